"""What this machine can do and what it lacks: `python -m core.training.report [--json] [--device cpu]`.

The exit code is 1 when something required is missing. Under torchrun the self-test runs over its ranks and on their
device, and rank 0 prints.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

BEGIN = time.perf_counter()
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which nobody needs here: none to fork

from core.parallel_state import launch  # noqa: E402
from core.parallel_state.collectives import all_gather_objects  # noqa: E402
from core.parallel_state.collectives.groups import world, world_group  # noqa: E402
from core.training.report import selftest  # noqa: E402
from core.training.report.checks import Check, machine, packages  # noqa: E402
from core.training.report.fast_paths import Compiler, fast_paths  # noqa: E402
from core.training.report.show import as_json, failures, show  # noqa: E402


def collect(device: str | None = None, self_test: bool = True) -> list[Check]:
    """Every check of one process; with `self_test` two more are forked, so call it before threads are started."""
    tested = selftest.local_checks() if self_test else []  # first: it forks, and its rates want idle cores
    compiler = Compiler()
    return [*packages(), *machine(), *fast_paths(device, compiler), *tested]


def collect_here(device: str | None = None) -> list[Check]:
    """The same on a world that torchrun started, whose own ranks and backend are tested. Collective."""
    checks = collect(device, self_test=False)
    with launch(device, timeout_s=selftest.DEADLINE_S) as place:
        group = world_group(selftest.WAIT_S)
        by_rank = all_gather_objects(selftest.joined(place, group), group)
        where = f"between {world()[1]} ranks on {place.type}"
    return checks + selftest.as_checks(by_rank, where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m core.training.report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--device", help="cpu, cuda, npu, xpu; default: the accelerator if there is one")
    parser.add_argument("--no-self-test", action="store_true", help="start no processes")
    given = parser.parse_args(arguments)
    started = int(os.environ.get("WORLD_SIZE", 1)) > 1
    checks = collect_here(given.device) if started else collect(given.device, not given.no_self_test)
    seconds = time.perf_counter() - BEGIN
    if int(os.environ.get("RANK", 0)) == 0:
        if given.json:
            print(as_json(checks, seconds))
        else:
            show(checks, seconds)
    return 1 if failures(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
