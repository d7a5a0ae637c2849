"""Training steps of every ZeRO stage on real ranks: the same bits, the plain twin's values, one verdict about NaN."""

import pytest
import torch
from torch import nn

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.optimizer import Offload, OptimizerConfig, ShardedAdamW, sharded_state_dict
from core.parallel_state import Layout
from core.parallel_state.layout import set_layout
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

CONFIG = OptimizerConfig(lr=0.05, weight_decay=0.3, clip_grad=0.5, lr_warmup_steps=2)


class Net(nn.Module):
    """Layers in a stack, sizes that are multiples of nothing; with tp > 1 every layer holds its columns."""

    stacks = {"layers": 2}

    def __init__(self, dtype, tp=1, rank=0):
        super().__init__()
        random = torch.Generator().manual_seed(4)
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Linear(13, 13, dtype=dtype)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(13, 13, generator=random, dtype=torch.float64) / 4)
                layer.bias.zero_()
            self.layers.append(layer)
        whole = torch.randn(7, 13, generator=random, dtype=torch.float64)
        rows = torch.cat([whole, torch.zeros(1, 13)]).chunk(tp)[rank]
        self.head = nn.Parameter(rows.to(dtype))
        set_layout(self.head, Layout((7, 13), {"tp": 0}, padding={0: 1}))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.head.T).float().square().sum()


def batch(step, ps, dtype):
    random = torch.Generator().manual_seed(10 * step + ps.index("dp"))
    return torch.randn(3, 13, generator=random, dtype=torch.float64).to(dtype)


def train(model, optimizer, ps, dtype, steps=5):
    norms = []
    for step in range(steps):
        model(batch(step, ps, dtype)).backward()
        norms.append(optimizer.step(num_tokens=3 * ps.size("dp")).grad_norm.item())
        optimizer.zero_grad()
    return norms


def trained(zero, dtype, tp=1, offload=None, **shard):
    ps = state(tp=tp)
    model = Net(dtype, tp, ps.index("tp"))
    if zero == "plain":
        sync = PerParameterGradSync(model, ps)
        optimizer = AdamW(model, ps, CONFIG, grad_sync=sync)
        step = optimizer.step
        optimizer.step = lambda **given: (sync.finish(), step(**given))[1]
        return ps, model, None, optimizer, train(model, optimizer, ps, dtype)
    shard = DataParallel(model, ps, zero_stage=zero, bucket_size=100, **shard)
    optimizer = ShardedAdamW(shard, CONFIG, offload=offload)
    return ps, model, shard, optimizer, train(model, optimizer, ps, dtype)


def result(zero, dtype, tp=1, offload=None):
    """Whole parameters on this rank, and the norms."""
    _, model, shard, _, norms = trained(zero, dtype, tp, offload)
    if shard is not None:
        shard.wait()
        shard.unshard(model)
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("world", "tp"),
    [(3, 1), (4, 2), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(4, 1, marks=pytest.mark.full)],
)
def test_every_stage_makes_the_same_bits_in_float32(ranks, world, tp):
    first = ranks(result, 0, torch.float32, tp, world=world)
    assert len({str(norms) for norms, _ in first}) == 1, "every rank has the same norms, to the last bit"
    for zero, offload in ((1, None), (2, Offload(fraction=0.5)), (3, None)):
        for (norms, found), (want_norms, want) in zip(
            ranks(result, zero, torch.float32, tp, offload, world=world), first, strict=True
        ):
            assert norms == want_norms
            assert all(torch.equal(found[name], want[name]) for name in want), zero


@pytest.mark.parametrize(("zero", "world", "tp"), [(1, 2, 1), (3, 4, 2)])
def test_steps_are_those_of_the_plain_twin(ranks, zero, world, tp):
    twin = ranks(result, "plain", torch.float64, tp, world=world)
    for (norms, found), (want_norms, want) in zip(
        ranks(result, zero, torch.float64, tp, world=world), twin, strict=True
    ):
        assert norms == pytest.approx(want_norms, rel=1e-12)
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-11, atol=1e-12)


def poisoned(zero, at):
    """The gradient of one element is infinite on one rank; what every rank says about it."""
    ps = state()
    model = Net(torch.float32)
    shard = DataParallel(model, ps, zero_stage=zero)
    optimizer = ShardedAdamW(shard, OptimizerConfig(max_skipped_steps=2))
    before = [buffer.weights.clone() for buffer in shard.buffers]
    model(batch(0, ps, torch.float32)).backward()
    shard.finish()
    for buffer in shard.buffers:
        for s in buffer.segments:
            if s.name == at[0] and s.interval[0] <= at[1] < s.interval[1]:
                buffer.gradients[s.span[0] + at[1] - s.interval[0]] = float("inf")
    skipped = optimizer.step(num_tokens=1).skipped.item()
    same = all(torch.equal(b.weights, w) for b, w in zip(shard.buffers, before, strict=True))
    names = optimizer.non_finite()
    optimizer.zero_grad()
    message = ""
    model(batch(0, ps, torch.float32) * float("nan")).backward()
    try:
        optimizer.step(num_tokens=1)
    except RuntimeError as error:
        message = str(error)
    return skipped, same, names, message


@pytest.mark.parametrize("zero", [0, 3])
def test_all_ranks_skip_alike_and_name_parameter_and_rank(ranks, zero):
    every = ranks(poisoned, zero, ("head", 90), world=3)  # the end of its bucket: the last rank's part
    assert len({str(found) for found in every}) == 1
    skipped, same, names, message = every[0]
    assert skipped and same and len(names) == 1 and names[0].startswith("head on rank "), names
    assert "step 2: 2 steps in a row were skipped" in message and "layers.0.bias on rank" in message


def resumed(directory, zero, other_zero):
    """Save in the middle, go on; load into another stage, go on: the same norms and weights."""
    ps, model, shard, optimizer, _ = trained(zero, torch.bfloat16)
    saved = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
    dist_checkpointing.save(saved, f"{directory}/at", ps=ps)
    want = train(model, optimizer, ps, torch.bfloat16, 3)
    fresh = Net(torch.bfloat16)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    again = DataParallel(fresh, ps, zero_stage=other_zero, bucket_size=300)
    second = ShardedAdamW(again, CONFIG, offload=Offload(fraction=0.4))
    into = {"model": sharded_state_dict(again), "optimizer": second.sharded_state_dict()}
    second.load_state_dict(dist_checkpointing.load(into, f"{directory}/at", ps=ps)["optimizer"])
    assert second.step_count == 5
    assert train(fresh, second, ps, torch.bfloat16, 3) == pytest.approx(want, rel=1e-12)
    for one, module in ((shard, model), (again, fresh)):
        one.wait()
        one.unshard(module)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(("zero", "other"), [(1, 3), (3, 0)])
def test_training_goes_on_under_another_stage(ranks, tmp_path, zero, other):
    ranks(resumed, str(tmp_path), zero, other, world=2)


def edited(directory):
    """One weight that is not its main rounded, on the last rank's part, is in the files."""
    ps, _, shard, optimizer, _ = trained(3, torch.bfloat16)
    segment, buffer = next((s, b) for b in shard.buffers for s in b.segments if s.name == "layers.1.weight")
    if ps.rank == ps.config.world_size - 1:
        buffer.weights[segment.span[0]] = 77.0
    state_dict = {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict()}
    dist_checkpointing.save(state_dict, directory, ps=ps)
    weights = [buffer.weights.clone() for buffer in shard.buffers]
    for b in shard.buffers:
        b.weights.zero_()
    dist_checkpointing.load({"model": sharded_state_dict(shard)}, directory, ps=ps)
    assert all(torch.equal(b.weights, w) for b, w in zip(shard.buffers, weights, strict=True))
    return sorted(dist_checkpointing.load_tensors_metadata(directory))


def test_a_weight_that_differs_from_its_main_is_kept(ranks, tmp_path):
    keys = ranks(edited, str(tmp_path / "at"), world=2)[0]
    assert [key for key in keys if key.startswith("model/")] == ["model/layers.weight"]
