"""torch's own clip_grad_norm_ on a DataParallel takes the norm of the model, over data and tensor ranks."""

import warnings

import pytest
import torch

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import Pipeline
from core.training import next_token_loss
from tests.models.gpt import batch, config, gpt
from tests.parity.whole import assert_same, whole_parameters
from tests.states import state

PLAIN = OptimizerConfig(lr=0.05, clip_grad=0.0, weight_decay=0.0)


def clipped(zero, tp, sp, order):
    found, norms = [], []
    for ps in (state(tp=tp, sp=sp), ParallelState.single("cpu")):
        model = gpt("llama", parallel=ps, seed=3)
        shard = DataParallel(model, ps, zero_stage=zero)
        optimizer = ShardedSGD(shard, PLAIN)
        for step in range(3):
            tokens, labels = batch(step)
            model(tokens, labels=labels).sum().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)))
            optimizer.step()
            optimizer.zero_grad()
        shard.remove()
        found.append(whole_parameters(model, ps))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-12)
    assert_same(*found)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("tp, sp, world", [(2, False, 2), pytest.param(2, True, 4, marks=pytest.mark.full)])
def test_torchs_clipping_over_tensor_ranks(ranks, zero, tp, sp, world):
    ranks(clipped, zero, tp, sp, 2.0, world=world)


def test_any_order(ranks):
    ranks(clipped, 3, 2, False, float("inf"), world=2)
    ranks(clipped, 1, 2, False, 3.0, world=2)


def on_a_pipeline():
    from core.models.gpt import gpt_stages, llama_spec

    ps = state(pp=2)
    stages = gpt_stages(config("llama"), llama_spec(), 101, 16, placement=(0, 1), parallel=ps)
    shard = DataParallel(stages, ps)
    tokens, labels = batch()
    Pipeline(stages, ps=ps, num_microbatches=2, grad_sync=shard).step(
        {"tokens": tokens, "labels": labels}, next_token_loss
    )
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*are scaled by a tensor")
        for p in parameters:
            p.grad.mul_(0.5 / (p.grad.norm() + 1))
    with pytest.warns(UserWarning, match="of 1 of 2 pipeline ranks are scaled by a tensor"):
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    factor = torch.tensor(0.5)
    with warnings.catch_warnings(record=True, action="always") as told:
        for p in parameters:
            p.grad.mul_(factor)
    assert not any("scaled by a tensor" in str(w.message) for w in told), "once"


def test_on_a_pipeline_it_is_told(ranks):
    ranks(on_a_pipeline)
