"""Stochastic rounding: unbiased, and a function of the element alone, not of who holds it."""

import pytest
import torch
from torch import nn

from core.optimizer import OptimizerConfig, ShardedAdamW
from core.optimizer.state.rounding import (
    Rounding,
    global_index,
    random_bits,
    random_bits_from,
    round_key,
    stochastic_bfloat16,
)
from core.parallel_state import Layout
from core.parallel_state.flat import volume
from core.parallel_state.layout import set_layout
from tests.optimizer.fake_shard import FakeShard

CONFIG = OptimizerConfig(lr=1e-3, main_params=False, clip_grad=0.0)


def bits(n, seed=0, step=1, name="weight", start=0):
    return random_bits(round_key(seed, step, name), torch.arange(start, start + n))


def test_bits_are_uniform_and_independent():
    found = bits(1 << 20)
    assert found.min() == 0 and found.max() == 0xFFFF
    for bit in range(16):  # each a fair coin: 5 sigma
        assert abs(((found >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / 1024
    assert len({tuple(bits(8, *key).tolist()) for key in [(0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b")]}) == 4
    other = bits(1 << 20, step=2)
    correlation = torch.corrcoef(torch.stack([found.double(), other.double()]))[0, 1].item()
    assert abs(correlation) < 5 / 1024
    assert not torch.equal(bits(64, start=1 << 32), found[:64]), "also beyond 32 bits of elements"


def test_the_mean_of_rounded_values_is_the_value():
    x = torch.full((1 << 20,), 1.0 + 0.3 * 2**-7)  # 0.3 of the way from 1 to the next
    rounded = stochastic_bfloat16(x, bits(1 << 20)).float()
    up = (rounded > 1).double().mean().item()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(up - 0.3) < 5 * (0.3 * 0.7) ** 0.5 / 1024
    down = (stochastic_bfloat16(-x, bits(1 << 20)).float() < -1).double().mean().item()
    assert down == up, "away from zero, whatever the sign"


def test_what_is_a_bfloat16_stays():
    x = torch.randn(1 << 12).bfloat16()
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    rounded = stochastic_bfloat16(x.float(), bits(1 << 12))
    assert torch.equal(rounded.view(torch.int16)[1:], x.view(torch.int16)[1:]) and rounded[0].isnan()


@pytest.mark.parametrize("split", [0, 1, 2])
def test_an_element_has_one_index_wherever_it_lies(split):
    layout = Layout((4, 6, 8), {"tp": split})
    whole = torch.arange(4 * 6 * 8).view(4, 6, 8)
    for rank in (0, 1):
        at, sizes = {"tp": rank}, {"tp": 2}
        shape, box = layout.local_shape(sizes), layout.box(at, sizes)
        start = [s.start for s in box]
        found = global_index(layout, start, shape, torch.arange(volume(tuple((0, n) for n in shape))))
        assert torch.equal(found, whole[box].reshape(-1))


def test_every_cut_and_every_layout_rounds_alike():
    value = torch.randn(8, 16)
    layout = Layout((8, 16), {"tp": 1})
    whole = Rounding(3, {}, {}).round(value.view(-1), "w", Layout((8, 16)), 0, 5).view(8, 16)
    for rank in (0, 1):
        rounding = Rounding(3, {"tp": rank}, {"tp": 2})
        local = value[:, 8 * rank : 8 * rank + 8].contiguous().view(-1)
        parts = [rounding.round(local[a:b], "w", layout, a, 5) for a, b in ((0, 13), (13, 64))]
        assert torch.equal(torch.cat(parts).view(8, 8), whole[:, 8 * rank : 8 * rank + 8])
    other = Rounding(3, {}, {}).round(value.view(-1), "w", Layout((8, 16)), 0, 6).view(8, 16)
    assert not torch.equal(other, whole), "each step draws anew"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(64, 37).bfloat16())
        self.bias = nn.Parameter(torch.randn(37).bfloat16())
        set_layout(self.weight, Layout((64, 37)))


def trained(**shard):
    model = Net()
    ours = ShardedAdamW(FakeShard(model, **shard), CONFIG)
    for step in range(3):
        random = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.main_grad.copy_(torch.randn(p.shape, generator=random))
        ours.step(num_tokens=1)
        ours.zero_grad()
    return model, ours


def test_weights_without_mains_move_alike_on_every_stage(monkeypatch):
    model, ours = trained()
    assert set(ours.states()["weight"]) == {"exp_avg", "exp_avg_sq"}
    assert set(ours.sharded_state_dict()["states"]["weight"]) == {"exp_avg", "exp_avg_sq"}
    assert not torch.equal(model.weight, Net().weight)
    monkeypatch.setattr("core.optimizer.state.streamed.CHUNK", 192)
    for rank in range(3):
        part = trained(zero_stage=1, ranks=3, rank=rank)[1].shard.buffers[0]
        for s in part.segments:
            want = model.get_parameter(s.name).detach().view(-1)[slice(*s.interval)]
            assert torch.equal(part.weights[slice(*s.span)], want)


def test_small_updates_are_not_lost():
    """A thousandth of an element's spacing, a thousand times: rounding to nearest would stay where it is."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ours = ShardedAdamW(FakeShard(model), OptimizerConfig(lr=2.0**-14, main_params=False, weight_decay=0.0))
    for _ in range(64):
        model.weight.main_grad.fill_(-1.0)
        ours.step(num_tokens=1)
        ours.zero_grad()
    assert model.weight.float().mean().item() == pytest.approx(1 + 64 * 2**-14, abs=5 * 2**-8 / 64)


def test_a_skipped_step_rounds_nothing():
    model, ours = trained()
    before = [p.detach().clone() for p in model.parameters()]
    model.weight.main_grad[0, 0] = float("nan")
    assert ours.step(num_tokens=1).skipped
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_half_precision_has_no_stochastic_rounding():
    model = nn.Linear(4, 4).half()
    with pytest.raises(ValueError, match=r"main_params=False rounds to bfloat16, but weight is float16"):
        ShardedAdamW(FakeShard(model), CONFIG)


@pytest.mark.parametrize("first", [0, 7, (1 << 31) - 3, (1 << 32) - 3, 5 << 32])
def test_indices_need_not_be_made(first):
    want = bits(10, start=first)
    assert torch.equal(random_bits_from(round_key(0, 1, "weight"), first, 10, want.device), want)
