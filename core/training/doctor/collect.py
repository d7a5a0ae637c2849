"""All checks, of one process or of a world that torchrun started."""

from core.parallel_state import launch
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.collectives.groups import world, world_group
from core.training.doctor import selftest
from core.training.doctor.check import Check, first_line
from core.training.doctor.fast_paths import Compiler, fast_paths
from core.training.doctor.machine import machine
from core.training.doctor.packages import packages


def collect(device: str | None = None, self_test: bool = True) -> list[Check]:
    """Every check of one process; with `self_test` two more are forked, so call it before threads are started."""
    # first: it forks, which threads would not survive, and its rates need idle cores
    self_test_checks = selftest.local_checks() if self_test else []
    compiler = Compiler()
    return [*packages(), *machine(), *fast_paths(device, compiler), *self_test_checks]


def collect_here(device: str | None = None) -> list[Check]:
    """The same on a world that torchrun started, whose own ranks and backend are tested. Collective."""
    checks = collect(device, self_test=False)
    try:
        with launch(device, timeout_s=selftest.DEADLINE_S) as rank_device:
            group = world_group(selftest.WAIT_S)
            outcomes_per_rank = all_gather_objects(selftest.joined(rank_device, group), group)
            participants = f"between {world()[1]} ranks on {rank_device.type}"
    except (RuntimeError, ValueError) as error:
        value = f"the ranks that torchrun started do not come together: {first_line(error)}"
        failed = Check(
            name="self-test", value=value, status="missing", remedy=selftest.REMEDY, required=True
        )
        return [*checks, failed]
    return checks + selftest.as_checks(outcomes_per_rank, participants)
