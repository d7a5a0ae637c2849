"""Arguments of Megatron-LM's `tools/preprocess_data.py` that are called otherwise in `core.datasets.prepare`."""

from collections.abc import Sequence

_FILE = "give --tokenizer FILE, a Hugging Face tokenizer.json, which holds vocabulary and merges"
_LEAVE = "leave it out"
ANSWERS = {
    "--output-prefix": "give --output PREFIX; PREFIX.bin is written, without _text_document behind the prefix",
    "--tokenizer-type": "give --tokenizer FILE or --train-tokenizer SIZE; without both every byte is a token",
    "--tokenizer-model": _FILE,
    "--vocab-file": _FILE,
    "--merge-file": _FILE,
    "--json-key": "give --text-key KEY",
    "--json-keys": "give --text-key KEY, one of them; each further one is a run of its own",
    "--vocab-size": f"{_LEAVE}: the tokenizer says it",
    "--keep-newlines": f"{_LEAVE}: newlines are kept",
    "--split-sentences": f"{_LEAVE}: a document stays one sequence",
    "--lang": f"{_LEAVE}: nothing is cut into sentences",
    "--keep-sequential-samples": f"{_LEAVE}: documents of a file stay in order",
    "--partitions": f"{_LEAVE}: --workers divides the text",
    "--dataset-impl": f"{_LEAVE}: the files are Megatron's .bin and .idx",
    "--log-interval": f"{_LEAVE}: a line on the terminal tells how far it is",
}


def answered(arguments: Sequence[str]) -> list[str]:
    """What to write for each of these words that is Megatron's; empty: none is."""
    flags = [
        word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")
    ]
    return [f"unknown {flag}; {ANSWERS[flag]}" for flag in flags if flag in ANSWERS]
