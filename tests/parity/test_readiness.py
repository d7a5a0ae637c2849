"""What the executor tells a GradSync: each pair once, at the moment its gradient is whole; sums may start at once."""

import pytest
import torch

from core.parallel_state.collectives import all_reduce
from core.pipeline.schedule import schedules as named
from tests.parity import pipelines
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync

M = 2


class Counted(PerParameterGradSync):
    """Sums a parameter over the replicas as soon as its last pair is told, from inside the last W; the rest (norms,
    which no thunk holds) when their stage is done."""

    def begin_step(self, pairs_per_param, *, split=False):
        super().begin_step(pairs_per_param, split=split)
        self.left, self.log, self.whole = dict(pairs_per_param), [], {}

    def ready(self, param):
        super().ready(param)
        self.left[param] -= 1
        assert self.left[param] >= 0, "a pair is told once"
        if self.left[param] == 0:
            self.log.append("in W")
            self._sum(param)

    def stage_done(self, stage):
        self.log.append("done")
        for param in stage.parameters():
            if param not in self.whole and self.left[param] == self.pairs(param):
                self._sum(param)

    def pairs(self, param):
        return M * sum(any(p is param for p in s.parameters()) for s in self.stages.values())

    def _sum(self, param):
        assert param not in self.whole
        self.whole[param] = param.main_grad.clone()
        all_reduce(param.main_grad, self.ps.group("dp"))

    def finish(self):
        """Everything has been summed by now; what was whole has not changed since."""
        assert self.whole.keys() == self._names.keys()
        if self.ps.size("dp") == 1:
            assert all(torch.equal(p.main_grad, before) for p, before in self.whole.items())


def step(schedule, recompute):
    ps = state(pp=2)
    placement = named.placement(schedule, 2)
    stages, sync = pipelines.build(placement, ps)
    sync.remove()
    sync = Counted(stages, ps)
    sync.stages = stages
    rows = {k: v[ps.index("dp") * M :][:M] for k, v in pipelines.batch(M * ps.size("dp")).items()}
    facts = {"schedule": schedule, "recompute": recompute, "num_microbatches": M}
    found = pipelines.run(stages, sync, ps, rows, **facts)
    want = pipelines.reference(M * ps.size("dp"), False, 0.0)
    assert not pipelines.differences(found, want)
    return sync.log


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule, recompute", [("1f1b", "none"), ("zb-v", "stage"), ("interleaved-zb", "layer")])
def test_sums_start_from_inside_the_last_w(ranks, schedule, recompute, world):
    chunks = len(named.placement(schedule, 2)) // 2
    for log in ranks(step, schedule, recompute, world=world):
        assert log.count("done") == chunks, "once per stage"
        first = log.index("done")
        assert log[:first].count("in W") >= 8, "every linear of a stage is on its way before its last W has ended"
        assert log[-1] == "done"
