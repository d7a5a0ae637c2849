"""A model built on meta is filled bucket by bucket: the values of an eager one, and never a whole copy on a rank."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.parallel_state import ParallelState
from core.testing.live import LiveBytes
from tests.parity.shards import whole_weights
from tests.states import state


def build(layers=16, size=32):
    torch.manual_seed(11)
    embed = nn.Embedding(8, size)
    body = [nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size)) for _ in range(layers)]
    return nn.ModuleDict({"embed": embed, "layers": nn.ModuleList(body), "norm": nn.BatchNorm1d(size)})


def same_values(zero):
    eager = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(11)
    shard = DataParallel(model, state(), zero_stage=zero)
    found = whole_weights(shard)
    assert all(torch.equal(found[name], p) for name, p in eager.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), eager.buffers(), strict=True))


@pytest.mark.parametrize("zero", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])
def test_a_model_on_meta_gets_the_values_of_an_eager_one(ranks, zero):
    ranks(same_values, zero, world=2)


def peak():
    with torch.device("meta"):
        model = build(60, 96)
    with LiveBytes() as probe:
        shard = DataParallel(model, state(), zero_stage=3)
    kept = sum(t.untyped_storage().nbytes() for b in shard.buffers for t in (b.weights, b.gradients))
    return probe.peak / kept


def test_building_holds_what_is_kept_and_a_layer(ranks):
    for ratio in ranks(peak, world=2):
        assert ratio <= 1.05, ratio


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))


def test_what_nobody_can_fill_is_refused():
    ps = ParallelState.single("cpu")
    with torch.device("meta"):
        bare, with_buffer = Bare(), nn.Module()
        with_buffer.register_buffer("table", torch.ones(3))
    with pytest.raises(ValueError, match=r"1 buffers are on meta and their modules have no reset_parameters\(\)"):
        DataParallel(with_buffer, ps)
    with pytest.raises(ValueError, match=r"Bare holds 1 parameters on meta .* give DataParallel init="):
        DataParallel(bare, ps)
    with torch.device("meta"):
        bare = Bare()
    DataParallel(bare, ps, init=lambda module: nn.init.constant_(module.weight, 4.0))
    assert (bare.weight == 4).all()
