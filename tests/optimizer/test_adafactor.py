"""Adafactor beside torch's own: the same numbers on every layout, states that open anywhere, what is refused."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from core.models.gpt import GPTModel
from core.optimizer import Offload, OptimizerConfig, ShardedAdafactor, build_optimizer
from core.optimizer.state.flat_shard import default_decays
from core.optimizer.whole.factored import FactoredMatrix
from core.parallel_state import Layout, ParallelState, layout_of
from core.parallel_state.layout import set_layout, true_part
from core.training.log.memory import expected_of
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import ALONE, Net, equal, give
from tests.parity.pipelines import SEED, VOCAB, S, batch
from tests.parity.test_muon import ROWS, On, facts_of, train
from tests.parity.whole import assert_same

# eps1: a key's bias has a gradient of rounding errors only, which would be divided by their own size
CONFIG = OptimizerConfig(
    optimizer="adafactor", lr=0.3, weight_decay=0.2, clip_grad=0.5, adafactor_eps1=1e-5, adafactor_d=1.5
)


def torchs(named, eps1=1e-5):
    """torch's Adafactor of (name, parameter, layout) in the same memory, decay of matrices only."""
    matrices = [p for name, p, layout in named if default_decays(name, layout)]
    vectors = [p for name, p, layout in named if not default_decays(name, layout)]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.Adafactor(groups, lr=0.3, eps=(eps1, 1e-3), d=1.5)


class WithKernel(Net):
    """A convolution too, of which torch factors the last two dims."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.kernel = nn.Parameter(torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype))


@pytest.mark.parametrize("dtype, eps1", [(torch.float64, None), (torch.float32, None), (torch.float64, 0.3)], ids=str)
def test_steps_are_torchs(dtype, eps1):
    """A first step that is skipped among them, and a parameter that misses an update."""
    model, twin = WithKernel(dtype), WithKernel(dtype)
    shard = FakeShard(model)
    ours = build_optimizer(shard, replace(CONFIG, adafactor_eps1=eps1))
    assert isinstance(ours, ShardedAdafactor)
    bias = nn.Parameter(twin.wide.bias.detach().flatten())
    twin.wide.bias = bias
    other = torchs([(name, p, layout_of(p)) for name, p in twin.named_parameters()], eps1)
    for step in range(5):
        skipped = step == 0
        shard.missing = ["first"] if step == 2 else []
        give(model, step, torch.nan if skipped else 1.0)
        if step == 2:
            model.first.main_grad.zero_()
        gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
        assert ours.step(num_tokens=1).skipped == skipped
        ours.zero_grad()
        if not skipped:
            for name, p in twin.named_parameters():
                p.grad = gradients[name].view_as(p)
            if step == 2:
                twin.first.grad = None
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            other.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.view_as(q), q, rtol=tolerance, atol=tolerance, msg=name)
        kinds = ours.state[p].keys()
        assert kinds == other.state[q].keys()
        for kind in kinds:
            found, want = ours.state[p][kind], other.state[q][kind]
            torch.testing.assert_close(found.flatten(), want.flatten(), rtol=tolerance, atol=1e-7, check_dtype=False)


def as_matrix(p):
    """A parameter as torch would have it, in the same memory: linears [out, in], experts [E, out, in]."""
    layout = layout_of(p)
    held = true_part(p.detach(), layout, ALONE.coordinate, ALONE.sizes)
    if not default_decays("", layout):
        return held
    return held.view(*held.shape[: "ep" in layout.split], -1, held.shape[-1])


@cache
def reference(style):
    """Whole weights of one process: torch's autograd, clipping and Adafactor, nothing of ours but the model."""
    model = GPTModel(*facts_of(style), VOCAB, S, parallel=ParallelState.single("cpu"), seed=SEED)
    found = dict(model.named_parameters())
    same = {
        n: nn.Parameter(as_matrix(p) if default_decays(n, layout_of(p)) else p.detach().flatten())
        for n, p in found.items()
    }
    other = torchs([(name, same[name], layout_of(p)) for name, p in found.items()])
    data = batch(ROWS)
    for _ in range(3):
        loss = sum(model(data["tokens"][i : i + 1], labels=data["labels"][i : i + 1]).sum() for i in range(ROWS))
        (loss / (data["labels"] != -100).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for name, p in found.items():
            same[name].grad = true_part(p.grad, layout_of(p), ALONE.coordinate, ALONE.sizes).reshape(same[name].shape)
        other.step()
        model.zero_grad()
    true = {name: tuple(map(slice, layout_of(p).shape)) for name, p in found.items()}
    return {name: p.detach()[true[name]].clone() for name, p in found.items()}


def compare(layouts):
    for on in layouts:
        assert_same(train(on, 3, config=CONFIG), reference(on.style))


def compare_loaded(on, directory):
    assert_same(train(on, 1, load=directory, config=CONFIG), reference(on.style))


TWO = (
    [On(3), On(1, pp=2, schedule="zb-v"), On(1, style="moe", expert=2)],
    [
        On(0),
        On(1),
        On(2),
        On(tp=2, sp=True),
        On(tp=2, sp=True, style="gpt2"),
        On(0, style="gpt2"),
        On(tp=2, sp=True, style="latent"),
        On(3, style="latent"),
        On(3, style="moe"),
    ],
)
FOUR = (
    [On(3, 4, tp=2, sp=True, expert=2, style="moe")],
    [On(2, 4, tp=2), On(3, 4, tp=2), On(2, 4, pp=2, schedule="zb-v", style="gpt2"), On(1, 4, replicate=2)],
)


@pytest.mark.parametrize("layouts", [TWO[0], FOUR[0]])
def test_every_layout_is_torchs_in_one_process(ranks, layouts):
    ranks(compare, layouts, world=layouts[0].world)


@pytest.mark.full
@pytest.mark.parametrize("layouts", [TWO[1], FOUR[1]])
def test_more_layouts_are_torchs_in_one_process(ranks, layouts):
    ranks(compare, layouts, world=layouts[0].world)


SAVED = [
    (On(3, 4, tp=2, sp=True), On(0, 1)),
    (On(1, expert=2, style="moe"), On(2, tp=2, sp=True, style="moe")),
    pytest.param(On(1, pp=2, schedule="zb-v"), On(3, 2), marks=pytest.mark.full),
    pytest.param(On(0, 1), On(2, 4, tp=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("saved, on", SAVED)
def test_a_checkpoint_goes_on_under_another_layout(ranks, tmp_path, saved, on):
    ranks(train, saved, 2, save=str(tmp_path / "at"), config=CONFIG, world=saved.world)
    ranks(compare_loaded, on, str(tmp_path / "at"), world=on.world)


@pytest.mark.parametrize("by", ["state_dict", "states"])
def test_a_restart_goes_on_bit_for_bit(by):
    (model, ours), (fresh, again) = made(torch.bfloat16), made(torch.bfloat16)
    for step in range(3):
        give(model, step)
        ours.step(num_tokens=1)
        ours.zero_grad()
    fresh.load_state_dict(model.state_dict())
    if by == "state_dict":
        again.load_state_dict(ours.state_dict())
    else:
        again.load_states(ours.states(), ours.step_count)
    for net, optimizer in ((model, ours), (fresh, again)):
        give(net, 5)
        optimizer.step(num_tokens=1)
    equal(ours, again)
    states = ours.states()
    with pytest.raises(ValueError, match=r"first has .* but not row_var; give all"):
        again.load_states({**states, "first": {"main": states["first"]["main"]}}, 3)
    wrong = {**states["first"], "row_var": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"row_var of first is \(3,\), elements None; this rank holds \(64,\)"):
        again.load_states({**states, "first": wrong}, 3)


def made(dtype=torch.float32, config=CONFIG, **options):
    model = Net(dtype)
    return model, build_optimizer(FakeShard(model), config, **options)


def test_states_take_rows_and_columns():
    model, ours = made()
    vectors = model.scale.numel() + model.wide.bias.numel()
    assert ours.memory() == (4 * (64 + 33 + 5 + 128) + 4 * ours._state_buffers[0].stop, 0) and vectors == 128
    (buffer,) = ours.shard.buffers
    buffer.dtype, buffer.grad_dtype = torch.float32, torch.float32
    assert expected_of(ours.shard, ours).optimizer == ours.memory()[0]


def test_a_step_waits_for_no_tensor(monkeypatch):
    model, ours = made()
    ours._watch._eager = False
    give(model, 0)
    tokens = torch.tensor(3.0)

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    stats = ours.step(num_tokens=tokens)
    monkeypatch.undo()
    assert not stats.skipped


def test_torchs_schedulers_groups_and_float16():
    model = Net(torch.float16)
    config = replace(CONFIG, lr=0.5, initial_loss_scale=8.0)
    ours = ShardedAdafactor(FakeShard(model), config, groups=[{"names": "second", "lr": 0.25, "d": 2.0}])
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1, 0.5)
    before = model.first.detach().clone()
    for step in range(3):
        give(model, step, (1.0 * ours.loss_scale).item())
        if step == 1:
            model.first.main_grad[0, 0] = float("inf")
        assert ours.step(num_tokens=1).skipped == (step == 1)
        ours.zero_grad()
        schedule.step()
    assert [group["lr"] for group in ours.param_groups] == [0.03125, 0.0625]
    assert [group["d"] for group in ours.param_groups] == [2.0, 1.5]
    assert ours.loss_scale.item() == 4 and not torch.equal(model.first, before)
    again = ShardedAdafactor(FakeShard(Net(torch.float16)), config, groups=[{"names": "second", "lr": 0.25}])
    again.load_state_dict(ours.state_dict())
    assert again.param_groups[0]["d"] == 2.0 and again.param_groups[1]["eps"] == (1e-5, 1e-3)


@pytest.mark.parametrize("columns_are_cut", [False, True])
def test_sums_of_intervals_are_those_of_the_whole(columns_are_cut):
    """A stack of three, of fused rows [2, 5] of which the second dim is cut and padded, or columns."""
    whole = torch.rand(3, 2, 5, 4, dtype=torch.float64)
    layout = Layout((3, 2, 5, 4), {"ep": 0, "tp": 3} if columns_are_cut else {"ep": 0, "tp": 2}, padding={2: 1})
    padded = nn.functional.pad(whole, (0, 0, 0, 1))
    rows, columns = torch.zeros(3, 10, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    product = torch.zeros_like(padded)
    by_row, by_column = torch.rand(3, 10, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    for rank in range(2):
        place = type("Place", (), {"coordinate": {"tp": rank}, "sizes": {"tp": 2}, "device": "cpu"})
        part = padded.chunk(2, 3 if columns_are_cut else 2)[rank].contiguous()
        parameter = nn.Parameter(part)
        set_layout(parameter, layout)
        matrix = FactoredMatrix.of("w", parameter, place)
        spread = []
        for first, last in pairwise((0, 7, 8, 31, part.numel())):
            found = matrix.sums(part.flatten()[first:last], (first, last))
            rows += found[0]
            columns += found[1]
            spread.append(matrix.spread(by_row, by_column, (first, last)))
        product.chunk(2, 3 if columns_are_cut else 2)[rank].copy_(torch.cat(spread).view_as(part))
    matrices = whole.view(3, 10, 4)
    torch.testing.assert_close(rows, matrices.sum(2))
    torch.testing.assert_close(columns, matrices.sum(1))
    torch.testing.assert_close(product[:, :, :5].reshape(3, 10, 4), by_row.unsqueeze(2) * by_column.unsqueeze(1))


def test_what_adafactor_cannot_do_is_refused():
    with pytest.raises(
        ValueError, match=r"adafactor takes parameters as a whole .* fraction 0.5 of them on the host"
    ):
        made(offload=Offload(fraction=0.5))
    with pytest.raises(ValueError, match="adafactor updates main parameters, but main_params=False"):
        made(config=replace(CONFIG, main_params=False))
    with pytest.raises(ValueError) as found:
        OptimizerConfig(adafactor_beta2_decay=0.8, adafactor_eps1=-2.0, adafactor_eps2=-1.0, adafactor_d=0.5)
    for part in (
        "eps1=-2.0 must be at least 0",
        "beta2_decay=0.8 must be at most 0",
        "eps2=-1.0 must be at least 0",
        "d=0.5 must be at least 1",
    ):
        assert part in str(found.value)
