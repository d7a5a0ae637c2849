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
        return text  # a name without quotes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m core.interop.deepspeed", description=deepspeed.__doc__
    )
    parser.add_argument("file")
    parser.add_argument("--data-ranks", type=int, help="data parallel ranks of the run")
    parser.add_argument(
        "--auto", action="append", default=[], metavar="KEY=VALUE", help='what "auto" stands for'
    )
    options = parser.parse_args(arguments)
    auto = {}
    for assignment in options.auto:
        key, _, text = assignment.partition("=")
        auto[key] = _value(text)
    try:
        # the table says the same
        with warnings.catch_warnings(action="ignore"):
            result = deepspeed.from_deepspeed(
                options.file, data_ranks=options.data_ranks, auto=auto
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result.table())
    print(f"\nflags: {' '.join(result.flags())}")
    print(f"{len(result.told)} keys, {len(result.unsupported)} unsupported")
    if result.unsupported:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
