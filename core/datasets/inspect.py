"""`python -m core.datasets.inspect PREFIX`: what a token file holds, and whether it is whole.

Exit code 0: it opens (with --verify: every byte is right); 1: it does not, and why.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.datasets.card import card_path
from core.datasets.token_file import TokenFile, file_paths
from core.datasets.tokenizers.any_tokenizer import tokenizer_of

_LOOKED_AT = 100_000  # documents whose length is read: evenly spread over a file of more


def facts(file: TokenFile, sample: int = 100) -> dict[str, Any]:
    """What there is to say about a token file, ready for JSON. `sample`: decode that many tokens."""
    card = file.card
    bin_path, idx_path = file_paths(file.prefix)
    found: dict[str, Any] = {
        "prefix": file.prefix,
        "documents": file.num_documents,
        "sequences": file.num_sequences,
        "tokens": file.num_tokens,
        "dtype": str(file.dtype),
        "bin_bytes": bin_path.stat().st_size,
        "idx_bytes": idx_path.stat().st_size,
        "document_tokens": _lengths(file),
        "card": None if card is None else str(card_path(file.prefix)),
    }
    if card is not None:
        found |= {
            "text_bytes": card.text_bytes,
            "vocab_size": card.vocab_size,
            "end_of_text": card.end_of_text,
            "tokenizer": card.tokenizer,
            "sources": list(card.sources),
            "skipped": dict(card.skipped),
            "bin_sha256": card.bin_sha256,
            "idx_sha256": card.idx_sha256,
        }
    return found | {"sample": _sample(file, sample)}


def _lengths(file: TokenFile) -> dict[str, Any]:
    """Of documents: shortest, longest, mean; how many were looked at."""
    n = file.num_documents
    if not n:
        return {"looked_at": 0}
    numbers = range(n) if n <= _LOOKED_AT else np.linspace(0, n - 1, _LOOKED_AT).astype(np.int64).tolist()
    lengths = [file.document_start(number + 1) - file.document_start(number) for number in numbers]
    return {"looked_at": len(lengths), "shortest": min(lengths), "longest": max(lengths), "mean": file.num_tokens / n}


def _sample(file: TokenFile, count: int) -> str | None:
    """The first tokens as text, None where nothing says which tokenizer they are of."""
    if count < 1 or file.card is None:
        return None
    try:
        tokenizer = tokenizer_of(file)
    except (ImportError, ValueError) as error:
        return f"({error})"
    return tokenizer.decode(file.tokens(0, min(count, file.num_tokens)).tolist())


def text(found: dict[str, Any]) -> str:
    """`facts` as lines for people."""
    documents = found["document_tokens"]
    lines = {
        "documents": f"{found['documents']:,} in {found['sequences']:,} sequences",
        "tokens": f"{found['tokens']:,} of {found['dtype']}",
        "files": f".bin {found['bin_bytes']:,} bytes, .idx {found['idx_bytes']:,} bytes",
    }
    if documents["looked_at"]:
        some = "" if documents["looked_at"] == found["documents"] else f" (of {documents['looked_at']:,} sampled)"
        lines["lengths"] = (
            f"shortest {documents['shortest']:,}{some}, longest {documents['longest']:,}{some}, "
            f"mean {documents['mean']:.1f} tokens"
        )
    if found["card"] is None:
        lines["card"] = "none: written by another program, so neither hashes nor tokenizer are known"
    else:
        skipped = ", ".join(f"{count} {reason}" for reason, count in found["skipped"].items()) or "nothing"
        lines |= {
            "text": f"{found['text_bytes']:,} bytes, {found['text_bytes'] / max(1, found['tokens']):.2f} per token",
            "vocabulary": f"{found['vocab_size']:,} tokens, tokenizer {found['tokenizer'][:16]}",
            "end of text": "none" if found["end_of_text"] is None else f"token {found['end_of_text']}",
            "sources": ", ".join(found["sources"]),
            "skipped": skipped,
            "sha256": f".bin {found['bin_sha256'][:16]}, .idx {found['idx_sha256'][:16]}",
        }
    if found["sample"] is not None:
        lines["sample"] = repr(found["sample"])
    return "\n".join([found["prefix"], *(f"  {name:<12} {value}" for name, value in lines.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m core.datasets.inspect", description=__doc__.partition(": ")[2])
    parser.add_argument("prefix", metavar="PREFIX", help="of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare with the hashes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--sample", type=int, default=100, metavar="N", help="decode the first N tokens (default 100)"
    )
    options = parser.parse_args(arguments)
    prefix = options.prefix
    if Path(prefix).suffix in (".bin", ".idx"):
        prefix = str(Path(prefix).with_suffix(""))
    try:
        file = TokenFile(prefix)
        if options.verify:
            file.verify()
        found = facts(file, options.sample)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.verify:
        found["verified"] = True
    print(json.dumps(found, indent=2) if options.json else text(found))
    if options.verify and not options.json:
        kind = "both tables" if file.card is None else "every byte"
        print(f"  {'verified':<12} {kind} read and right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
