"""Ranks that begin differently: values are the first rank's, other parameters are refused."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel, check_replicas
from tests.parity.shards import whole_weights
from tests.states import state


def net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[1].running_mean.fill_(float(seed))
    model[2].weight.data = torch.randn(5, 2).t()  # not contiguous
    model[2].bias.requires_grad_(False)
    model.register_buffer("flags", torch.tensor([True, False, bool(seed % 2)]))
    return model


def unseeded(zero):
    ps = state()
    model, first = net(7 + ps.index("dp")), net(7)
    shard = DataParallel(model, ps, zero_stage=zero)
    weights = whole_weights(shard)
    assert all(torch.equal(weights[name], p) for name, p in first.named_parameters() if name in weights)
    assert torch.equal(model[2].bias, first[2].bias), "frozen ones too"
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), first.buffers(), strict=True))
    shard.remove()
    check_replicas(model, ps)


@pytest.mark.parametrize("zero", [1, 3, pytest.param(0, marks=pytest.mark.full)])
def test_all_ranks_begin_with_the_first_ones_values(ranks, zero):
    ranks(unseeded, zero, world=2)


def other_parameters(change):
    ps = state()
    model = net(1)
    if ps.index("dp"):
        model[0].bias.requires_grad_(False) if change == "frozen" else model.append(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="build the same model on every rank") as told:
        DataParallel(model, ps)
    return str(told.value)


@pytest.mark.parametrize(("change", "name"), [("frozen", "0.bias"), ("longer", "3.bias, 3.weight")])
def test_ranks_with_other_parameters_are_refused(ranks, change, name):
    for text in ranks(other_parameters, change, world=2):
        assert f"ranks 0 and 1 do not train the same parameters: {name} (" in text


def saves_whole_values():
    ps = state()
    model = net(1)
    before = {name: p.detach().clone() for name, p in net(1).state_dict().items()}
    DataParallel(model, ps, zero_stage=3)
    with pytest.warns(UserWarning, match=r"ZeRO stage 3: .*; to save, sharded_state_dict"):
        found = model.state_dict()
    assert found.keys() == before.keys() and all(torch.equal(found[name], p) for name, p in before.items())


def test_a_state_dict_under_zero_3_is_whole_and_told(ranks):
    ranks(saves_whole_values, world=2)
