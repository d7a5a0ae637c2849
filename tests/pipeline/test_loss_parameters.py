"""What loss_fn reads: a parameter of the last stage is trained as in one process, one of nobody's is told, and so are
activations that hooks have kept."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from tests.states import state

DTYPE = torch.float64


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=DTYPE)
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=DTYPE))

    def forward(self, x):
        return self.linear(x)


def batch(step, rows=8):
    return torch.randn(rows, 4, dtype=DTYPE, generator=torch.Generator().manual_seed(step))


def loss_with(temperature):
    def loss(output, microbatch):
        return (output * temperature).square().sum(), output.numel()

    return loss


def parts():
    torch.manual_seed(0)
    return [nn.Linear(4, 4, dtype=DTYPE), Head()]


def trained(executor_of, modules, ps, zero_stage, rows):
    """Weights of these modules after two steps of an executor."""
    shard = DataParallel(modules, ps, zero_stage=zero_stage)
    config = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0, weight_decay=0.0)
    optimizer = ShardedSGD(shard, config)
    executor = executor_of(shard)
    heads = [m for module in modules for m in module.modules() if isinstance(m, Head)]
    temperature = heads[0].temperature if heads else 1.0
    for step in range(2):
        optimizer.step(executor.step(batch(step)[rows], loss_with(temperature)).num_tokens)
        optimizer.zero_grad()
    return {name: value.clone() for module in modules for name, value in module.state_dict().items()}


def of_the_last_stage(schedule, zero_stage):
    ps = state(pp=2)
    modules = [parts()[ps.index("pp")]]
    replicas = ps.size("dp")
    rows = slice(ps.index("dp") * 8 // replicas, (ps.index("dp") + 1) * 8 // replicas)
    weights = trained(
        lambda shard: Pipeline(modules, ps=ps, schedule=schedule, num_microbatches=2, grad_sync=shard),
        modules, ps, zero_stage, rows,
    )  # fmt: skip
    return ps.index("pp"), weights


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("world, zero_stage", [(2, 0), (4, 1), (4, 3)])
def test_a_temperature_of_the_last_stage_is_trained_as_in_one_process(ranks, schedule, world, zero_stage):
    ps = ParallelState.single("cpu")
    whole = nn.Sequential(*parts())
    expected = trained(
        lambda shard: SingleStage(whole, ps=ps, num_microbatches=4, grad_sync=shard), [whole], ps, 0, slice(0, 8)
    )
    for stage, weights in ranks(of_the_last_stage, schedule, zero_stage, world=world):
        assert ("temperature" in weights) == (stage == 1)
        if stage == 1:
            of_head = {name.removeprefix("1."): value for name, value in expected.items() if name.startswith("1.")}
            torch.testing.assert_close(weights, of_head, rtol=0, atol=1e-12)


def said_of_nobodys(owner):
    ps = state(pp=2)
    module = parts()[ps.index("pp")]
    temperature = nn.Parameter(torch.tensor(1.5, dtype=DTYPE), requires_grad=owner != "frozen")
    pipeline = Pipeline([module], ps=ps, num_microbatches=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(3):
            pipeline.step(batch(step), loss_with(temperature), 1 / 32)
    pipeline.close()
    return [str(w.message) for w in caught]


def test_a_parameter_of_nobodys_is_told_where_the_loss_is(ranks):
    first, last = ranks(said_of_nobodys, "loss_fn")
    assert not first
    assert len(last) == 1 and "1 parameters that the model does not have" in last[0], last
    assert "nothing on the other pipeline ranks" in last[0]
    assert ranks(said_of_nobodys, "frozen") == [[], []]


def test_in_one_process_it_is_told_as_well():
    model = nn.Linear(4, 4, dtype=DTYPE)
    executor = SingleStage(model, ps=ParallelState.single("cpu"), num_microbatches=2)
    with pytest.warns(UserWarning, match="1 parameters that the model does not have, of shapes"):
        executor.step(batch(0), loss_with(nn.Parameter(torch.tensor(1.5, dtype=DTYPE))))
    executor.step(batch(1), loss_with(nn.Parameter(torch.tensor(1.5, dtype=DTYPE))))


def said_of_activations(where):
    """A penalty on what a hook has kept of the middle of each stage."""
    ps = state(pp=2)
    module = nn.Sequential(nn.Linear(4, 4, dtype=DTYPE), nn.Tanh(), nn.Linear(4, 4, dtype=DTYPE))
    kept = []
    module[1].register_forward_hook(lambda module, inputs, output: kept.append(output))

    def loss(output, microbatch):
        penalty = {"inside": kept[-1], "detached": kept[-1].detach(), "output": output}[where]
        return output.square().sum() + penalty.square().sum(), output.numel()

    pipeline = Pipeline([module], ps=ps, num_microbatches=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(2):
            pipeline.step(batch(step), loss, 1 / 32)
    pipeline.close()
    return [str(w.message) for w in caught]


def test_a_penalty_on_activations_that_hooks_have_kept_is_told(ranks):
    first, last = ranks(said_of_activations, "inside")
    assert not first
    assert len(last) == 1 and "activations of modules that are not their stage's output" in last[0], last
    for where in ("detached", "output"):
        assert ranks(said_of_activations, where) == [[], []]
