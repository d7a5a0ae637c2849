"""Whether the run is to end here, agreed by all ranks, without making the host wait for the device."""

import torch

from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_reduce
from core.parallel_state.environment import HostCopy, reading_waits


class StopFlag:
    """One flag per step, all-reduced over the world, so that all ranks stop after the same step.

    On an accelerator the flag of one step is read in the next one: the device has a step to run meanwhile, and the
    run ends one step after the one in which a rank was asked. A single process asks nobody.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._ps = ps
        self._reads_late = reading_waits(ps.device)
        self._under_way: HostCopy | None = None

    def look(self, asked: bool) -> bool:
        """Whether any rank was `asked` to stop, here or, on an accelerator, in the step before. Collective."""
        if self._ps.world is None:
            return asked
        # filled in on the device: a copy from the host would wait
        flag = torch.full((1,), int(asked), dtype=torch.int32, device=self._ps.device)
        latest = HostCopy(all_reduce(flag, self._ps.world, "max"))
        if not self._reads_late:
            return bool(latest.read())
        # read a step late, its copy to the host has arrived and nobody waits
        before = self._under_way
        self._under_way = latest
        return before is not None and bool(before.read())
