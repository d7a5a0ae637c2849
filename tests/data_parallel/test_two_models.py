"""An actor and a critic, each in a DataParallel: norms over both, and what is put in the place of their data."""

import copy
import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW, clip_grad_norm_, get_grad_norm
from tests.states import state


def rows(step, ps=None):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x if ps is None else x.chunk(ps.size("dp"))[ps.index("dp")]


def backward(models, x):
    sum(model(x).square().mean() for model in models).backward()
    return [p for model in models for p in model.parameters()]


def norms(zero_stage):
    ps = state()
    torch.manual_seed(0)
    whole = [nn.Linear(6, n, dtype=torch.float64) for n in (4, 1)]
    ours = copy.deepcopy(whole)
    for model in ours:
        DataParallel(model, ps, zero_stage=zero_stage)
    right = nn.utils.clip_grad_norm_(backward(whole, rows(0)), 0.3)
    parameters = backward(ours, rows(0, ps))
    found = [get_grad_norm(parameters), clip_grad_norm_(parameters, 0.3)]
    clipped = [p.grad.norm() for p in parameters]
    wanted = [p.grad.norm() for model in whole for p in model.parameters()]
    return max(float((a - b).abs()) for a, b in zip([*found, *clipped], [right, right, *wanted], strict=True))


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_one_norm_of_both(ranks, zero_stage):
    assert max(ranks(norms, zero_stage, world=2)) < 1e-6


def said_of(program, zero_stage, steps=12):
    ps = state()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 6, dtype=torch.float64))
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.01))
    kept = {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(steps):
            program(model, kept, step)
            model(rows(step, ps)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in found if "ZeRO stage 3" not in str(w.message)]


def flat_vector(model, kept, step):
    if step == 1:
        kept["flat"] = flat = torch.cat([p.data.reshape(-1) for p in model.parameters()])
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.data = part.view_as(p)
    if step == 5:
        kept["flat"].mul_(0.5)


def tied_by_data(model, kept, step):
    if step == 1:
        model[2].weight.data = model[0].weight.data


def averaged_for_a_look(model, kept, step):
    if step == 3:
        average = kept["average"] = [p.data * 0.5 for p in model.parameters()]
        before = [p.data.clone() for p in model.parameters()]
        for p, values in zip(model.parameters(), average, strict=True):
            p.data = values
        with torch.no_grad():
            model(rows(step))
        for p, values in zip(model.parameters(), before, strict=True):
            p.data = values


def halved(model, kept, step):
    model[0].weight.data = model[0].weight.data * 0.9


@pytest.mark.parametrize("program", [flat_vector, tied_by_data], ids=lambda f: f.__name__)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_data_that_is_written_elsewhere_is_told(ranks, program, zero_stage):
    for messages in ranks(said_of, program, zero_stage, world=2):
        assert messages and all("was put in the place of its data" in message for message in messages)


@pytest.mark.parametrize("program", [averaged_for_a_look, halved], ids=lambda f: f.__name__)
def test_data_that_nobody_writes_is_not(ranks, program):
    assert ranks(said_of, program, 1, world=2) == [[], []]


def local_steps():
    ps = state()
    model = nn.Linear(6, 6, dtype=torch.float64)
    shard = DataParallel(model, ps, zero_stage=1)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.01))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for last_is_outside in (True, False, False):
            with shard.no_sync():
                model(rows(0, ps)).square().mean().backward()
            if last_is_outside:
                model(rows(1, ps)).square().mean().backward()
            before = len(found)
            optimizer.step()
            optimizer.zero_grad()
            assert not (last_is_outside and len(found) > before)
    return [str(w.message) for w in found]


def test_a_step_whose_backwards_were_all_in_no_sync_is_told_once(ranks):
    for messages in ranks(local_steps, world=2):
        assert len(messages) == 1 and "every backward of this step was inside of no_sync" in messages[0]


class Observed(nn.Module):
    """As torch.ao's observers of channels: buffers get their size from the first forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6, dtype=torch.float64)
        self.register_buffer("largest", torch.empty(0, dtype=torch.float64))

    def forward(self, x):
        y = self.lin(x)
        seen = y.detach().abs().amax(0)
        if not self.largest.numel():
            self.largest.resize_(seen.shape).copy_(seen)
        self.largest.mul_(0.9).add_(seen, alpha=0.1)
        return y / self.largest


def observed():
    ps, found = state(), []
    for wrap in (DataParallel, lambda model, ps: nn.parallel.DistributedDataParallel(model)):
        torch.manual_seed(0)
        model = Observed()
        forward = wrap(model, ps)
        forward = model if isinstance(forward, DataParallel) else forward
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            forward(rows(step, ps)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.lin.weight.detach().clone())
    return float((found[0] - found[1]).abs().max())


def test_buffers_that_are_resized_in_the_first_forward_are_the_first_rank_s(ranks):
    assert max(ranks(observed, world=2)) < 1e-12


def wrapped_again():
    ps = state()
    model = nn.Linear(6, 6, dtype=torch.float64)
    shard = DataParallel(model, ps, zero_stage=1)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.01))
    shard.remove()
    again = DataParallel(model, ps, zero_stage=3)
    # a second time, it undoes nothing of another's
    shard.remove()
    model(rows(0, ps)).square().mean().backward()
    with pytest.raises(ValueError, match="the DataParallel that this optimizer updates was removed"):
        optimizer.step()
    again.remove()


def test_an_optimizer_of_a_removed_one_is_refused(ranks):
    ranks(wrapped_again, world=2)
