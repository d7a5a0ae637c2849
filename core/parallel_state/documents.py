"""Rows that hold several documents: a batch's tokens remember it, for a model that is given them without its mask."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def mark_documents(batch: Mapping[str, Any]) -> None:
    """`tokens.of_documents`, of a batch with `document_begin`. A copy of its tokens does not remember."""
    begin = batch.get("document_begin")
    tokens = batch.get("tokens", batch.get("input_ids"))
    if not (isinstance(begin, Tensor) and isinstance(tokens, Tensor)):
        return
    # on an accelerator nobody waits for a look
    if begin.device.type != "cpu" or bool(begin.any()):
        tokens.of_documents = True  # type: ignore[attr-defined]
