"""What lies beside the weights in a folder: configuration, tokenizer, generation settings."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.datasets.card import recorded_tokenizer
from core.datasets.tokenizers.any_tokenizer import load_tokenizer
from core.datasets.tokenizers.folder import stop_tokens
from core.models.huggingface.family.family import Fields
from core.models.huggingface.family.rope import rope_kind

# of a folder: what a tokenizer, a chat or generate() needs
_CARRIED_OVER = (
    "*token*.json",
    "*.model",
    "vocab.*",
    "merges.txt",
    "generation_config.json",
    "*.jinja",
)


def copy_companions(
    source: Path,
    folder: Path,
    dtype: str,
    length: int | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """The configuration of `source` with the dtype that was written, and what lies beside it.

    length: of the sequences that the model was trained with, which is said where it is more than the source's.
    tokenizer: what the run says of its own; the tokens that end its answers end what is generated, too.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    if length is not None:
        _lengthen(config, length)
    _write_json(folder / "config.json", config)
    for pattern in _CARRIED_OVER:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    _stop_at_answer_ends(folder, tokenizer)


def _stop_at_answer_ends(folder: Path, tokenizer: Mapping[str, Any] | None) -> None:
    """List the tokens that end a run's answers among those at which `generate` stops."""
    known = stop_tokens(folder)
    ends = [] if tokenizer is None else tokenizer.get("answer_ends", [])
    new = [token for token in ends if token not in known]
    if not new:
        return
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    _write_json(path, settings | {"eos_token_id": [*known, *new]})


def _lengthen(config: dict[str, Any], length: int) -> None:
    """Say `length` positions where fewer are said; what angles follow from stays."""
    said = config.get("max_position_embeddings")
    if not isinstance(said, int) or said >= length:
        return
    config["max_position_embeddings"] = length
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        # these scale from the model's positions where no others are said
        if isinstance(rope, dict) and rope_kind(rope) in ("llama3", "yarn"):
            rope.setdefault("original_max_position_embeddings", said)


def write_companions(
    fields: Fields, tokenizer: Mapping[str, Any] | None, folder: Path, dtype: str
) -> None:
    """Of a model that was born here.

    tokenizer: what its run says: the path of the file, its identity, the tokens that end a text and an answer. Warns
    where the file is not there any more, or is another one.
    """
    end = None if tokenizer is None else tokenizer.get("end_of_text")
    # theirs have tokens of their own where these are not said
    tokens = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    _write_json(folder / "config.json", fields | tokens | {"torch_dtype": dtype})
    _write_json(folder / "generation_config.json", {"eos_token_id": end} if end is not None else {})
    _stop_at_answer_ends(folder, tokenizer)
    if tokenizer is not None and tokenizer.get("path") is not None:
        _copy_tokenizer(tokenizer, folder)


def _copy_tokenizer(tokenizer: Mapping[str, Any], folder: Path) -> None:
    """`tokenizer.json` of the run, and the little that AutoTokenizer needs beside it."""
    path = recorded_tokenizer(tokenizer["path"], tokenizer["identity"])
    end = tokenizer["end_of_text"]
    if not path.is_file():
        warnings.warn(
            f"the run's tokenizer {path} is not there; put its tokenizer.json into the folder",
            stacklevel=2,
        )
        return
    if load_tokenizer(path, end).identity != tokenizer["identity"]:
        warnings.warn(
            f"{path} is another tokenizer than the run's ({tokenizer['identity'][:12]}); put that "
            "one's tokenizer.json into the folder",
            stacklevel=2,
        )
        return
    shutil.copyfile(path, folder / "tokenizer.json")
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
    names = [token["content"] for token in added if token["id"] == end]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"eos_token": names[0]} if names else {}
    )
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
