"""`python -m core.datasets.inspect PREFIX`: what a token file holds, and whether it is whole.

Exit code 0: it opens (with --verify: every byte is right); 1: it does not, and why.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.datasets.card import card_path
from core.datasets.token_file import TokenFile, file_paths
from core.datasets.tokenizers.any_tokenizer import tokenizer_of
from core.their_folders import huggingface_told

# documents whose length is read: evenly spread over a file of more
_MAX_SAMPLED = 100_000


def facts(file: TokenFile, sample: int = 100) -> dict[str, Any]:
    """Everything that `--json` prints about a token file. `sample`: decode that many tokens."""
    card = file.card
    bin_path, idx_path = file_paths(file.prefix)
    values: dict[str, Any] = {
        "prefix": file.prefix,
        "documents": file.num_documents,
        "sequences": file.num_sequences,
        "tokens": file.num_tokens,
        "dtype": str(file.dtype),
        "bin_bytes": bin_path.stat().st_size,
        "idx_bytes": idx_path.stat().st_size,
        "document_tokens": _document_lengths(file),
        "card": None if card is None else str(card_path(file.prefix)),
    }
    if card is not None:
        values |= {
            "text_bytes": card.text_bytes,
            "vocab_size": card.vocab_size,
            "end_of_text": card.end_of_text,
            "tokenizer": card.tokenizer,
            "sources": list(card.sources),
            "skipped": dict(card.skipped),
            "bin_sha256": card.bin_sha256,
            "idx_sha256": card.idx_sha256,
        }
    return values | {"sample": _sample_text(file, sample)}


def _document_lengths(file: TokenFile) -> dict[str, Any]:
    """Tokens of the documents: shortest, longest, mean; how many of them were read for it."""
    count = file.num_documents
    if not count:
        return {"looked_at": 0}
    numbers: Sequence[int] = range(count)
    if count > _MAX_SAMPLED:
        numbers = np.linspace(0, count - 1, _MAX_SAMPLED).astype(np.int64).tolist()
    lengths = [file.document_start(number + 1) - file.document_start(number) for number in numbers]
    mean = file.num_tokens / count
    return {
        "looked_at": len(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": mean,
    }


def _sample_text(file: TokenFile, count: int) -> str | None:
    """The first tokens as text, None where nothing says which tokenizer they are of."""
    if count < 1 or file.card is None:
        return None
    try:
        tokenizer = tokenizer_of(file)
    except (ImportError, ValueError) as error:
        return f"({error})"
    return tokenizer.decode(file.tokens(0, min(count, file.num_tokens)).tolist())


def text(values: dict[str, Any]) -> str:
    """`facts` as lines for people."""
    documents = values["document_tokens"]
    tokens = values["tokens"]
    lines = {
        "documents": f"{values['documents']:,} in {values['sequences']:,} sequences",
        "tokens": f"{tokens:,} of {values['dtype']}",
        "files": f".bin {values['bin_bytes']:,} bytes, .idx {values['idx_bytes']:,} bytes",
    }
    if documents["looked_at"]:
        if documents["looked_at"] == values["documents"]:
            hint = ""
        else:
            hint = f" (of {documents['looked_at']:,} sampled)"
        lines["lengths"] = (
            f"shortest {documents['shortest']:,}{hint}, longest {documents['longest']:,}{hint}, "
            f"mean {documents['mean']:.1f} tokens"
        )
    if values["card"] is None:
        lines["card"] = (
            "none: written by another program, so neither hashes nor tokenizer are known"
        )
    else:
        lines |= _card_lines(values)
    if values["sample"] is not None:
        lines["sample"] = repr(values["sample"])
    return "\n".join(
        [values["prefix"], *(f"  {name:<12} {value}" for name, value in lines.items())]
    )


def _card_lines(values: dict[str, Any]) -> dict[str, str]:
    """What is known from the card alone."""
    text_bytes = values["text_bytes"]
    skipped = ", ".join(f"{count} {reason}" for reason, count in values["skipped"].items())
    return {
        "text": f"{text_bytes:,} bytes, {text_bytes / max(1, values['tokens']):.2f} per token",
        "vocabulary": f"{values['vocab_size']:,} tokens, tokenizer {values['tokenizer'][:16]}",
        "end of text": "none"
        if values["end_of_text"] is None
        else f"token {values['end_of_text']}",
        "sources": ", ".join(values["sources"]),
        "skipped": skipped or "nothing",
        "sha256": f".bin {values['bin_sha256'][:16]}, .idx {values['idx_sha256'][:16]}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m core.datasets.inspect", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("prefix", metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare with the hashes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--sample",
        type=int,
        default=100,
        metavar="N",
        help="decode the first N tokens (default 100)",
    )
    options = parser.parse_args(arguments)
    # a shell completes the name of a file, not its prefix
    prefix = options.prefix
    if Path(prefix).suffix in (".bin", ".idx"):
        prefix = str(Path(prefix).with_suffix(""))
    try:
        if told := huggingface_told(prefix, "a token file"):
            raise ValueError(told)
        file = TokenFile(prefix)
        if options.verify:
            file.verify()
        values = facts(file, options.sample)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.verify:
        values["verified"] = True
    output = json.dumps(values, indent=2) if options.json else text(values)
    if options.verify and not options.json:
        kind = "both tables" if file.card is None else "every byte"
        output += f"\n  {'verified':<12} {kind} read and right"
    try:
        print(output, flush=True)
    except BrokenPipeError:
        # `| head` has read enough; what is left is flushed at exit, to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
