"""The tokens that end a turn of the assistant, as the conversations of a text have them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from core.datasets.splits import TokenSource
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer

_LOOKED_AT = 64  # documents


def answer_ends(
    source: TokenSource, tokenizer: AnyTokenizer, tokenizer_file: str | Path | None
) -> list[int]:
    """Which tokens its first 64 documents' answers end with; none of a text without answers.

    Only tokens that no text becomes: a template may end a turn with no token of its own. tokenizer_file: the
    tokenizer's; None: bytes.
    """
    if not source.marks_answers:
        return []
    stop = source.document_start(min(_LOOKED_AT, source.num_documents))
    answers = source.answers(0, stop)
    last = np.flatnonzero(answers & ~np.append(answers[1:], False))
    ends = {*source.tokens(0, stop)[last].tolist()}
    return sorted(ends & {tokenizer.end_of_text, *_added_tokens(tokenizer_file)})


def _added_tokens(tokenizer_file: str | Path | None) -> list[int]:
    if tokenizer_file is None:
        return []
    content: Any = json.loads(Path(tokenizer_file).read_text(encoding="utf-8"))
    return [token["id"] for token in content.get("added_tokens") or []]
