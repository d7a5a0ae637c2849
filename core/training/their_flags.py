"""Flags of `generate` as other programs spell them: read where they are ours, answered where they are not."""

import argparse
from collections.abc import Sequence

_FIRST = "it is the first word, without a flag"
_NOT = "not here: one text is drawn token by token; leave it out"
_LENGTH = "give --new-tokens N, which counts what is written and not the prompt"
_END = "give --end-of-text TOKEN"
_DTYPE = "leave it out: a folder is read in float32, a checkpoint as its run had it"
_DEVICE = "leave it out: the device is found, and torchrun with --parallel.tensor spreads the model"
_CHAT = "give --chat [--system TEXT] --prompt TEXT"

# their flag -> what to do here
_ANSWERS = {
    "--do-sample": "give --temperature T above 0, such as 0.8; without it the likeliest token is taken",
    "--greedy": "leave it out: without --temperature the likeliest token is taken",
    "--num-return-sequences": "give --prompt as many times",
    "--num-samples": "give --prompt as many times",
    "--start": "give --prompt TEXT",
    "--text": "give --prompt TEXT",
    "--input": "give --prompt TEXT",
    "--prompts": "give --prompt TEXT, as many times as there are",
    "--max-length": _LENGTH,
    "--length": _LENGTH,
    "--out-seq-length": _LENGTH,
    "--max-tokens": _LENGTH,
    "--messages": _CHAT,
    "--apply-chat-template": _CHAT,
    "--chat-template": "leave it out: that beside the tokenizer is read",
    "--system-prompt": "give --system TEXT, with --chat",
    "--eos-token": _END,
    "--eos-token-id": _END,
    "--stop": _END,
    "--stop-strings": _END,
    "--random-seed": "give --seed N",
    "--model": _FIRST,
    "--model-name-or-path": _FIRST,
    "--load": _FIRST,
    "--checkpoint": _FIRST,
    "--tokenizer-model": "give --tokenizer FILE",
    "--tokenizer-name": "give --tokenizer FILE",
    "--tensor-model-parallel-size": "give --parallel.tensor N",
    "--tensor-parallel-size": "give --parallel.tensor N",
    "--use-cache": "leave it out: keys and values are kept",
    "--trust-remote-code": "not here: nothing runs code of a folder; leave it out",
    "--batch-size": "leave it out: all prompts are one batch",
} | {
    flag: answer
    for answer, flags in {
        _NOT: "--num-beams --num-beam-groups --penalty-alpha --length-penalty --early-stopping --repetition-penalty "
        "--no-repeat-ngram-size --min-p --typical-p --min-length --min-new-tokens --presence-penalty "
        "--frequency-penalty --assistant-model",
        _DTYPE: "--dtype --torch-dtype --bf16 --fp16 --load-in-4bit --load-in-8bit",
        _DEVICE: "--device --device-map",
    }.items()
    for flag in flags.split()
}


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """As `parse_args`; with underscores in flags, too. Raises SystemExit (2): flags that are not ours, answered."""
    ours = parser._option_string_actions
    spelt = []
    unknown = []
    for word in words:
        head, equals, value = word.partition("=")
        dashed = head.replace("_", "-")
        if not head.startswith("--") or head == "--":
            spelt.append(word)
        elif head in ours or dashed in ours:
            spelt.append(f"{head if head in ours else dashed}{equals}{value}")
        elif dashed in _ANSWERS:
            unknown.append(f"unknown {head}; {_ANSWERS[dashed]}")
        else:
            spelt.append(word)
    if unknown:
        parser.error(
            "\n  ".join(["these flags are not ours:", *unknown] if unknown[1:] else unknown)
        )
    return parser.parse_args(spelt)
