"""What a Hugging Face folder says of its tokens beside `tokenizer.json`: ends of texts, padding, chat template."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.datasets.tokenizers.any_tokenizer import AnyTokenizer, load_tokenizer
from core.datasets.tokenizers.eos_token import eos_token_beside

TOKENIZER = "tokenizer.json"
# files that shape what becomes of a chat, beside tokenizer.json
_SHAPING = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
)
# of config.json: which class of transformers' reads the rest
_CHOOSES_CLASS = ("model_type", "tokenizer_class")


def without_tokenizer(folder: str | Path, option: str) -> str:
    """What is said of a folder that has no tokenizer.json; `option` names one in another place."""
    return (
        f"{folder} has no {TOKENIZER}; give {option} (tokenizers' file; transformers' "
        "AutoTokenizer.from_pretrained(...).save_pretrained writes one, from tokenizer.model too)"
    )


def shaping_digest(folder: str | Path) -> str:
    """SHA-256 (hex) of all beside tokenizer.json that shapes a chat's tokens: template, settings, special tokens."""
    digest = hashlib.sha256()
    for pattern in _SHAPING:
        for path in sorted(Path(folder).glob(pattern)):
            if path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    config = _read(Path(folder) / "config.json")
    digest.update(json.dumps([config.get(name) for name in _CHOOSES_CLASS]).encode())
    return digest.hexdigest()


def answer_end(tokenizer_file: str | Path | None, tokenizer: AnyTokenizer) -> int:
    """The token behind an answer: `eos_token` of the tokenizer_config.json beside the file, as in TRL; else the end
    of text."""
    token = None if tokenizer_file is None else eos_token_beside(Path(tokenizer_file))
    if token is None:
        return tokenizer.end_of_text
    try:
        return load_tokenizer(tokenizer_file, token).end_of_text
    except ValueError:  # not among its tokens
        return tokenizer.end_of_text


def ends_told(
    tokenizer: AnyTokenizer,
    tokenizer_file: str | Path | None,
    *,
    answers: bool,
    ends: Sequence[int] = (),
) -> str:
    """`documents end with <|endoftext|> (token 0)`, and what of the `eos_token` beside the file, if that is another.

    answers: of conversations, whose answers end with that one, or with `ends`, where their text has others.
    """
    end = tokenizer.end_of_text
    eos = answer_end(tokenizer_file, tokenizer)
    said = f"documents end with {_named(tokenizer, end)}"
    if tokenizer.starts:
        starts = ", ".join([_named(tokenizer, token) for token in tokenizer.starts])
        said = f"documents begin with {starts} and end with {_named(tokenizer, end)}"
        if answers:
            # a template writes all of a chat
            said = f"prompts without a chat template begin with {starts}, documents end with {_named(tokenizer, end)}"
    if answers and [*ends] not in ([], [eos]):
        named = " or ".join(_named(tokenizer, token) for token in ends)
        return f"answers end with {named}, where generate stops as well; {said}"
    if eos == end:
        return said
    if answers:
        return f"answers end with {_named(tokenizer, eos)}, the tokenizer's eos_token; {said}"
    return (
        f"{said}, not with the tokenizer's eos_token, {_named(tokenizer, eos)} (prepare's --end-of-text takes "
        "another)"
    )


def _named(tokenizer: AnyTokenizer, token: int) -> str:
    text = tokenizer.decode([token])
    return f"{text} (token {token})" if text else f"token {token}"


def stop_tokens(folder: str | Path) -> list[int]:
    """The ids at which transformers' `generate` stops: generation_config.json's, else config.json's; may be none."""
    for name in ("generation_config.json", "config.json"):
        found = _read(Path(folder) / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if numbers := [number for number in ids if isinstance(number, int)]:
            return numbers
    return []


def sampling_of(folder: str | Path) -> dict[str, Any]:
    """How generation_config.json has transformers' `generate` choose tokens; what changes nothing is left out."""
    said = _read(Path(folder) / "generation_config.json")
    plain = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1}
    found = {name: said[name] for name, value in plain.items() if said.get(name, value) != value}
    if said.get("do_sample"):
        drawn = ("temperature", "top_k", "top_p", "min_p")
        found |= {name: said[name] for name in drawn if said.get(name) is not None}
    return found


def padding_token(folder: str | Path) -> int | None:
    """`pad_token_id` of config.json."""
    found = _read(Path(folder) / "config.json").get("pad_token_id")
    return found if isinstance(found, int) else None


def model_type(folder: str | Path) -> str | None:
    """`model_type` of config.json."""
    found = _read(Path(folder) / "config.json").get("model_type")
    return found if isinstance(found, str) else None


def dtype_of_weights(folder: str | Path) -> str | None:
    """`dtype` of config.json (`torch_dtype` before transformers 5), "bfloat16" for instance."""
    config = _read(Path(folder) / "config.json")
    found = config.get("dtype", config.get("torch_dtype"))
    return found if isinstance(found, str) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
