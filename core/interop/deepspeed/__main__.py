"""The command line of `from_deepspeed`."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from core.interop import deepspeed


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m core.interop.deepspeed", description=deepspeed.__doc__)
    parser.add_argument("file")
    parser.add_argument("--data-ranks", type=int, help="data parallel ranks of the run")
    parser.add_argument("--auto", action="append", default=[], metavar="KEY=VALUE", help='what "auto" stands for')
    given = parser.parse_args(arguments)
    auto = {key: _value(text) for key, _, text in (each.partition("=") for each in given.auto)}
    try:
        with warnings.catch_warnings(action="ignore"):  # the table says the same
            found = deepspeed.from_deepspeed(given.file, data_ranks=given.data_ranks, auto=auto)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found.table())
    print(f"\nflags: {' '.join(found.flags())}")
    print(f"{len(found.told)} keys, {len(found.unsupported)} unsupported")
    return 1 if found.unsupported else 0


if __name__ == "__main__":
    sys.exit(main())
