"""What an accelerator has to prove: right numbers, ceilings, the step beside its peers, memory, pipeline, saves.

    python -m benchmarks.accelerator --dry                         # tiny sizes, on a CPU too
    python -m benchmarks.accelerator checks staged ceilings --json a.json
    python -m benchmarks.accelerator step --model 1.4b --json b.json

A line each; one failure ends nothing. The last line is one JSON object of the figures. Status 1 if something failed.
"""

import argparse
import importlib
import sys

import torch

from benchmarks.accelerator.bench import Bench
from benchmarks.harness import report
from core.parallel_state.environment import local_device

PARTS = ("checks", "staged", "ceilings", "step", "memory", "pipeline", "save")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes and few rounds: does everything run?"
    )
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument(
        "--model", default="1.4b", choices=("small", "1.4b", "3.6b"), help="of the part step"
    )
    for name, default in (("rounds", 3), ("steps", 20), ("warm", 8)):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"of the part step; default: {default}"
        )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    b = Bench(local_device(args.device), args.dry)
    b.model, b.rounds, b.steps, b.warm = args.model, args.rounds, args.steps, args.warm
    print(f"torch {torch.__version__} on {b.device}{', dry' if b.dry else ''}", flush=True)
    for part in args.parts or PARTS:
        print(f"--- {part}", flush=True)
        module = importlib.import_module(f"benchmarks.accelerator.{part}")
        b.line(f"{part}: all of it", lambda bench, run=module.run: run(bench))
    told = f"{len(b.failed)} failed: {', '.join(b.failed) or 'none'}; not here: {', '.join(b.not_here) or 'none'}"
    print(told, flush=True)
    report(b.figures, args.json)
    return 1 if b.failed else 0


if __name__ == "__main__":
    sys.exit(main())
