"""A rank that fails while ZeRO's messages are under way: every rank stops soon, and says where it began."""

import time

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.pipeline import Pipeline, PipelineError
from tests.pool import Pool
from tests.states import state


class Stage(nn.Module):
    """Fails after its first layer, when the next one has been asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.fails = False

    def forward(self, x):
        x = self.layers[0](x)
        if self.fails:
            raise KeyError("on purpose")
        return self.layers[2](self.layers[1](x))


def square(output, x):
    return output.square().sum(), len(x)


def stops(zero, schedule, where):
    """(seconds, message) of the second step, in which rank `where` fails."""
    ps = state(pp=2)
    stages = {index: Stage() for index in ([0, 3], [1, 2])[ps.index("pp")]}
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=8)
    pipe = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=4, grad_sync=shard)
    pipe.step(torch.ones(4, 8), square)
    shard.zero_grad()
    stages[max(stages)].fails = ps.rank == where
    begin = time.perf_counter()
    with pytest.raises(PipelineError) as told:
        pipe.step(torch.ones(4, 8), square)
    return time.perf_counter() - begin, str(told.value)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("zero", "schedule", "where"),
    [(3, "zb-v", 3), pytest.param(3, "zb-v", 0, marks=FULL), pytest.param(2, "zb-v", 1, marks=FULL)],
)
def test_a_failure_does_not_leave_others_waiting_for_weights(zero, schedule, where):
    pool = Pool()  # a failure leaves its processes without groups
    try:
        answers = pool(stops, zero, schedule, where, world=4)
    finally:
        pool.close()
    for seconds, text in answers:
        assert seconds < 10 and f"rank {where}, stage" in text and "KeyError: 'on purpose'" in text
