"""The command: explain a run, or write a file to start from."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core.parallel_state.environment import started_processes
from core.training.config.explain import explained, template
from core.training.config.sources import merge
from core.training.log.leaving import say_to_reader

_DESCRIPTION = "What a run is told: every field with its value, its origin and its meaning; or a file to start from."
_EPILOG = """\
--explain FILE.toml ... [FLAGS]   merges the files (the last one wins) and flags such as --optimizer.lr 3e-4, prints
                                  every field, how the batch is made up of microbatches and ranks, and everything that
                                  is wrong. Exit status 1 where something is.
--template [FILE.toml]            prints, or writes, a file with every field, its meaning, kind and default.

python -m core.training.config --template run.toml
python -m core.training.config --explain run.toml --world-size 8 --parallel.tensor 4
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status: 0, 1 where the run has mistakes, 2 where the command has."""
    parser = argparse.ArgumentParser(
        prog="python -m core.training.config",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "--explain",
        nargs="*",
        action="extend",
        metavar="FILE.toml",
        help="tell what a run of these files and flags is",
    )
    subject.add_argument(
        "--template", nargs="?", const="-", metavar="FILE.toml", help="write a commented file"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the run; default: WORLD_SIZE, or 1",
        default=None,
    )
    options, flags = parser.parse_known_args(arguments)
    try:
        if options.template is not None:
            if flags:
                parser.error(f"--template takes no flags: {' '.join(flags)}")
            return _write_template(options.template)
        if options.world_size is None:
            world = _world(parser)
        else:
            world = options.world_size
        if world < 1:
            parser.error(f"--world-size {world} must be at least 1")
        files = [word for path in options.explain for word in ("--config", path)]
        text, mistakes = explained(merge([*files, *flags]), world)
        say_to_reader(f"{text}\n")
    except (ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if mistakes:
        return 1
    return 0


def _world(parser: argparse.ArgumentParser) -> int:
    """What WORLD_SIZE says. Raises SystemExit: it is no number."""
    try:
        return started_processes()
    except ValueError as error:
        parser.error(f"{error}, or give --world-size N")


def _write_template(path: str) -> int:
    """To stdout, or to a file that is not there yet."""
    if path == "-":
        say_to_reader(template())
        return 0
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        print(f"error: {path} is there already; give another name, or remove it", file=sys.stderr)
        return 2
    print(f"written: {path}\nnext: python -m core.training.config --explain {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
