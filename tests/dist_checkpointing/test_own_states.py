"""What modules put into `state_dict()` beside parameters and buffers is told; empty buffers come back."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.dist_checkpointing import load, save, sharded_state_dict
from core.optimizer import sharded_state_dict as state_of_shard
from tests.models.gpt import gpt
from tests.states import state


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"amax": 7.0}


class Saves(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.ones(1)


def hooked():
    module = nn.Linear(4, 4)
    module._register_state_dict_hook(lambda module, state, prefix, metadata: state)
    return module


def told(make_state):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_state()
        make_state()
    return [str(w.message) for w in caught if "sharded_state_dict has parameters and buffers" in str(w.message)]


@pytest.mark.parametrize(
    "make, how",
    [
        (lambda: Extra(4, 4), "get_extra_state of Extra"),
        (lambda: Saves(4, 4), "_save_to_state_dict of Saves"),
        (hooked, "a state_dict hook of Linear"),
    ],
)
@pytest.mark.parametrize("zero", [None, 1, 3])
def test_what_is_left_out_is_told_once(single, make, how, zero):
    module = nn.Sequential(nn.Linear(4, 4), make())
    if zero is None:
        messages = told(lambda: sharded_state_dict(module, single))
    else:
        shard = DataParallel(module, single, zero_stage=zero)
        messages = told(lambda: state_of_shard(shard))
    assert len(messages) == 1
    assert how in messages[0]


def test_ordinary_modules_are_not_told(single):
    parts = nn.Sequential(nn.BatchNorm1d(3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.LSTM(3, 3))
    assert told(lambda: sharded_state_dict(parts, single)) == []
    assert told(lambda: sharded_state_dict(gpt(), single)) == []


def three_steps(module, optimizer, ps):
    for step in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double().chunk(2)[ps.index("dp")]
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


READS = {
    "nothing": lambda module: None,
    "a norm": lambda module: [p.norm().item() for p in module.parameters()],
    "one number": lambda module: module[0].weight[0, 0].item(),
    "a state_dict": lambda module: module.state_dict(),
    "a forward": lambda module: module(torch.ones(2, 6).double()),
}


def loaded(directory):
    """Weights after a load at stage 3, and after steps from there, by what was read before it."""
    ps = state()

    def made(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).double()
        shard = DataParallel(module, ps, zero_stage=3)
        return module, shard, torch.optim.SGD(module.parameters(), lr=0.1)

    module, shard, _ = made(0)
    save({"model": state_of_shard(shard)}, directory, ps=ps)
    saved = [p.detach().clone() for p in module.parameters()]
    found = {}
    for what, read in READS.items():
        module, shard, optimizer = made(1)
        read(module)
        load({"model": state_of_shard(shard)}, directory, ps=ps)
        first = [p.detach().clone() for p in module.parameters()]
        assert all(map(torch.equal, first, saved))
        three_steps(module, optimizer, ps)
        found[what] = first + [p.detach().clone() for p in module.parameters()]
    return found


def test_what_is_loaded_at_stage_3_is_not_what_was_read_before(ranks, tmp_path):
    for found in ranks(loaded, tmp_path / "saved", world=2):
        for weights in found.values():
            assert all(map(torch.equal, weights, found["nothing"]))


def test_an_empty_buffer_comes_back(single, tmp_path):
    def made(value):
        module = nn.Linear(4, 4)
        module.register_buffer("rows", torch.zeros(0, 3))
        module.register_buffer("count", torch.tensor(value))
        return module

    save({"model": sharded_state_dict(made(7), single)}, tmp_path / "saved", ps=single)
    module = made(0)
    load({"model": sharded_state_dict(module, single)}, tmp_path / "saved", ps=single)
    assert module.rows.shape == (0, 3)
    assert module.count == 7
