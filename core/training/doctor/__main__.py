"""What this machine can do and what it lacks: `python -m core.training.doctor [--json] [--device cpu]`.

The exit code is 1 when something required is missing. Under torchrun the self-test runs over its ranks and on their
device, and rank 0 prints.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

BEGIN = time.perf_counter()
# the self-test forks: numpy must not start threads of its own before
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from core.training.doctor.check import Check, first_line  # noqa: E402
from core.training.doctor.packages import packages  # noqa: E402
from core.training.doctor.show import as_json, failures, show  # noqa: E402

try:
    from core.parallel_state.environment import started_processes
    from core.training.doctor import collect
except (ImportError, OSError) as error:
    # no torch, or one whose libraries do not load
    WITHOUT_TORCH = f"the rest needs torch: {first_line(error)}"
else:
    WITHOUT_TORCH = ""


def _checks(device: str | None, self_test: bool) -> list[Check]:
    # a machine without torch still gets the list of packages; under torchrun the ranks that exist are tested
    if WITHOUT_TORCH:
        return [*packages(), Check(name="machine", value=WITHOUT_TORCH, status="info")]
    if started_processes() > 1:
        return collect.collect_here(device)
    return collect.collect(device, self_test)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m core.training.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument(
        "--device", help="cpu, cuda, npu, xpu; default: the accelerator if there is one"
    )
    parser.add_argument("--no-self-test", action="store_true", help="start no processes")
    options = parser.parse_args(arguments)
    checks = _checks(options.device, not options.no_self_test)
    # imports included, which take the most
    seconds = time.perf_counter() - BEGIN
    if int(os.environ.get("RANK", 0)) == 0:
        if options.json:
            print(as_json(checks, seconds))
        else:
            show(checks, seconds)
    if failures(checks):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
