"""`paracore COMMAND ...`, also `python -m core COMMAND ...`: the modules that are commands, by a word."""

import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from core import __version__

# word -> (module, what it does); each module is a command by itself, as `python -m core.pretrain`
COMMANDS = {
    "pretrain": ("core.pretrain", "train a GPT on text, alone or under torchrun"),
    "prepare": ("core.datasets.prepare", "text files to a token file, on all cores"),
    "inspect": ("core.datasets.inspect", "what a token file holds, and whether it is whole"),
    "config": (
        "core.training.config",
        "explain a run's settings, or write a commented file of them",
    ),
    "generate": (
        "core.training.generate",
        "text from a Hugging Face folder, or from a checkpoint of it",
    ),
    "evaluate": (
        "core.training.evaluate",
        "loss, perplexity and bits per byte of a run or checkpoint",
    ),
    "checkpoint": (
        "core.dist_checkpointing",
        "inspect, verify, diff, reshard, prune, export checkpoints",
    ),
    "simulate": ("core.pipeline.simulate", "draw a pipeline schedule with its bubble and memory"),
    "doctor": ("core.training.doctor", "what this machine has, lacks, and how fast it is"),
    "deepspeed": (
        "core.interop.deepspeed",
        "what becomes of a ds_config.json, and the flags for it",
    ),
    "huggingface": ("core.models.huggingface", "Hugging Face folders to checkpoints and back"),
}
_EPILOG = """\
`paracore COMMAND --help` tells the arguments of one. On several processes:
  torchrun --nproc-per-node 4 -m core.pretrain --config run.toml"""


def main(args: Sequence[str] | None = None) -> int:
    """Hand the words after the command to its module. The exit status; 2 where there is no such command.

    Raises SystemExit: as the command ends.
    """
    command_line = sys.argv[1:] if args is None else list(args)
    if not command_line or command_line[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command_line[0] in ("--version", "-V"):
        print(f"paracore {__version__}")
        return 0
    if command_line[0] not in COMMANDS:
        print(
            f"error: there is no command {command_line[0]!r}; {_nearest(command_line[0])}",
            file=sys.stderr,
        )
        return 2
    module, _ = COMMANDS[command_line[0]]
    sys.argv = [f"paracore {command_line[0]}", *command_line[1:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _help() -> str:
    lines = ["usage: paracore COMMAND ...   (or: python -m core COMMAND ...)", ""]
    lines += [f"  {word:<12} {purpose}" for word, (_, purpose) in COMMANDS.items()]
    return "\n".join([*lines, "", _EPILOG])


def _nearest(word: str) -> str:
    close = get_close_matches(word, COMMANDS, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"there are {', '.join(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
