"""AdamW against torch.optim.AdamW with clip_grad_norm_, on every layout, bit for bit after a restart."""

import pytest
import torch
from torch import nn

from core.optimizer import OptimizerConfig
from core.parallel_state import Layout, ParallelState
from core.parallel_state.layout import set_layout
from tests.states import state
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

ALONE = ParallelState.single("cpu")
CONFIG = OptimizerConfig(
    lr=0.1,
    min_lr=0.01,
    lr_schedule="cosine",
    lr_warmup_steps=2,
    lr_decay_steps=6,
    weight_decay=0.3,
    adam_beta2=0.95,
    clip_grad=0.5,
)


class Net(nn.Module):
    """Decays: `matrix`. Does not: `scale` (one dim), `wide.bias` (a bias of two dims)."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(2)
        self.matrix = nn.Parameter(torch.randn(4, 3, dtype=dtype))
        self.scale = nn.Parameter(torch.randn(3, dtype=dtype))
        self.wide = nn.Module()
        self.wide.bias = nn.Parameter(torch.randn(2, 2, dtype=dtype))


def gradients(seed):
    random = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(4, 3, generator=random, dtype=torch.float64),
        "scale": torch.randn(3, generator=random, dtype=torch.float64),
        "wide.bias": torch.randn(2, 2, generator=random, dtype=torch.float64),
    }


def trained(model, config=CONFIG):
    return AdamW(model, ALONE, config, grad_sync=PerParameterGradSync(model, ALONE))


def give(model, gradient, factor=1.0):
    for name, p in model.named_parameters():
        p.main_grad.copy_(gradient[name] * factor)


class Twin:
    """What the step is, in torch's words."""

    def __init__(self, config=CONFIG, dtype=torch.float64):
        self.model, self.config, self.count = Net(dtype).to(torch.float64), config, 0
        groups = [
            {"params": [self.model.matrix], "weight_decay": config.weight_decay},
            {"params": [self.model.scale, self.model.wide.bias], "weight_decay": 0.0},
        ]
        betas = (config.adam_beta1, config.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)

    def step(self, gradient):
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate.at(self.count)
        for name, p in self.model.named_parameters():
            p.grad = gradient[name].clone()
        limit = self.config.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.count += 1
        return norm.item()


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e3], ids="clip {}".format)
def test_steps_are_those_of_torch(clip):
    config = OptimizerConfig(**{**CONFIG.__dict__, "clip_grad": clip})
    model, twin = Net(), Twin(config)
    ours = trained(model, config)
    for step in range(5):
        assert ours.learning_rate == config.learning_rate.at(step)
        give(model, gradients(step), 7 * 16.0)
        stats = ours.step(num_tokens=torch.tensor(7.0), loss_scale=16.0)
        assert stats.grad_norm.item() == pytest.approx(twin.step(gradients(step)), rel=1e-12)
        assert not stats.found_inf.item() and not stats.skipped.item()
        assert all(p.grad is None for p in model.parameters())
        for p, q in zip(model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)
    assert ours.step_count == 5 and ours.skipped_steps == 0


def test_float32_goes_through_the_kernels_own_factor():
    model, twin = Net(torch.float32), Twin(dtype=torch.float32)
    ours = trained(model)
    for step in range(5):
        give(model, gradients(step), 7 * 16.0)
        ours.step(num_tokens=7, loss_scale=16.0)
        twin.step(gradients(step))
    for p, q in zip(model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(p, q.float(), rtol=1e-5, atol=1e-6)


def test_16_bit_parameters_have_a_float32_main():
    model, twin = Net(torch.bfloat16), Twin(dtype=torch.bfloat16)
    ours = trained(model)
    for step in range(5):
        give(model, gradients(step))
        ours.step(num_tokens=1)
        twin.step(gradients(step))
    for name, q in twin.model.named_parameters():
        main = ours.states()[name]["main"].tensor
        assert main.dtype == torch.float32
        torch.testing.assert_close(main, q.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(model.get_parameter(name), main.bfloat16())
        assert not torch.equal(main, main.bfloat16().float()), "the main remembers more than 16 bits"


def test_mains_follow_parameters_changed_by_hand():
    model = Net(torch.bfloat16)
    ours = trained(model)
    with torch.no_grad():
        model.scale.fill_(3.0)
    ours.reload_parameters()
    ours.step(num_tokens=1)  # no gradient, no decay of one dim
    assert torch.equal(model.scale, torch.full((3,), 3.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "no tokens"])
def test_a_norm_that_is_not_finite_changes_nothing(dtype, bad):
    model, twin = Net(dtype), Net(dtype)
    ours, other = trained(model), trained(twin)
    for optimizer, net in ((ours, model), (other, twin)):
        give(net, gradients(0))
        optimizer.step(num_tokens=1)
    give(model, gradients(1))
    if bad != "no tokens":
        model.scale.main_grad[1] = bad
    stats = ours.step(num_tokens=0 if bad == "no tokens" else 1)
    assert stats.skipped.item() and stats.found_inf.item() and ours.skipped_steps == 1
    same(ours, other)
    ours.zero_grad()
    for optimizer, net in ((ours, model), (other, twin)):  # Adam's own count did not move either
        optimizer.step_count = 2
        give(net, gradients(2))
        optimizer.step(num_tokens=1)
    same(ours, other)


def same(a, b):
    for name, kinds in a.states().items():
        for kind, part in kinds.items():
            assert torch.equal(part.tensor, b.states()[name][kind].tensor), (name, kind)
    for p, q in zip(a._parameters.values(), b._parameters.values(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_restart_goes_on_bit_for_bit(dtype):
    model = Net(dtype)
    ours = trained(model)
    for step in range(4):
        give(model, gradients(step))
        ours.step(num_tokens=0 if step == 1 else 3)  # one skipped step among them
    saved = {n: {k: part.tensor.clone() for k, part in kinds.items()} for n, kinds in ours.states().items()}
    fresh = Net(dtype)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    again = trained(fresh)
    again.load_states(saved, ours.step_count, skipped_steps=ours.skipped_steps)
    same(again, ours)
    for step in range(4, 6):
        for optimizer, net in ((ours, model), (again, fresh)):
            give(net, gradients(step))
            optimizer.step(num_tokens=3)
    same(again, ours)
    assert again.step_count == 6 and again.skipped_steps == 1 and again.learning_rate == ours.learning_rate


def test_states_exist_before_the_first_step_and_are_live():
    model = Net()
    ours = trained(model)
    part = ours.states()["matrix"]["exp_avg"]
    assert not part.tensor.any() and part.layout == Layout((4, 3)) and part.box == (slice(0, 4), slice(0, 3))
    give(model, gradients(0))
    ours.step(num_tokens=1)
    assert part.tensor.all()


def test_load_refuses_what_is_not_this_ranks():
    ours = trained(Net())
    states = ours.states()
    with pytest.raises(ValueError, match="2 parameters given for 3; not on both sides: scale"):
        ours.load_states({n: states[n] for n in ("matrix", "wide.bias")}, 1)
    with pytest.raises(ValueError, match=r"scale has .* but not exp_avg_sq"):
        ours.load_states({**states, "scale": {k: states["scale"][k] for k in ("main", "exp_avg")}}, 1)
    with pytest.raises(ValueError, match=r"main of matrix is \(2, 3\), this rank holds \(4, 3\)"):
        ours.load_states({**states, "matrix": {**states["matrix"], "main": torch.zeros(2, 3)}}, 1)
    assert ours.step_count == 0


def test_a_module_without_main_grad_is_refused():
    model = Net()
    sync = PerParameterGradSync(model, ALONE)
    model.late = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="1 of 4 trainable parameters have no main_grad, first late"):
        AdamW(model, ALONE, CONFIG, grad_sync=sync)


def test_zero_grad_is_the_syncs():
    model = Net()
    ours = trained(model)
    give(model, gradients(0))
    ours.zero_grad()
    assert not any(p.main_grad.any() for p in model.parameters())


def test_a_narrow_main_grad_is_widened():
    model, twin = Net(torch.bfloat16), Twin(dtype=torch.bfloat16)
    ours = AdamW(model, ALONE, CONFIG, grad_sync=PerParameterGradSync(model, ALONE, grad_dtype=torch.bfloat16))
    rounded = {name: g.bfloat16().double() for name, g in gradients(0).items()}
    give(model, rounded)
    ours.step(num_tokens=1)
    twin.step(rounded)
    torch.testing.assert_close(ours.states()["matrix"]["main"].tensor, twin.model.matrix.float().detach())


def spread(tp, num_tokens, poison, cp=1):
    """`matrix` in rows over tp with two padded rows; every rank's states, two steps, one of them poisoned."""
    ps = state(tp=tp, cp=cp)
    layout = Layout((4, 3), {"tp": 0}, padding={0: 4})
    model = Net()
    full = torch.cat([model.matrix.detach(), torch.zeros(4, 3)])
    rows = slice(ps.index("tp") * 8 // tp, (ps.index("tp") + 1) * 8 // tp)
    model.matrix = nn.Parameter(full[rows].clone())
    set_layout(model.matrix, layout)
    sync = PerParameterGradSync(model, ps)
    ours = AdamW(model, ps, CONFIG, grad_sync=sync)
    norms = []
    for step in range(3):
        gradient = gradients(step)
        gradient["matrix"] = torch.cat([gradient["matrix"], torch.zeros(4, 3)])[rows]
        give(model, gradient)
        sync.finish()  # every data replica brings the same: their sum is dp times it
        if poison and step == 1 and ps.rank == ps.config.world_size - 1:
            model.matrix.main_grad.fill_(float("nan"))  # padding of the last rank: nobody's
            model.scale.main_grad.fill_(float("nan"))  # a copy that another rank owns
        if poison and step == 1 and ps.rank == 0:
            model.matrix.main_grad[0, 0] = float("inf")
        stats = ours.step(num_tokens=num_tokens and num_tokens * ps.size("dp-cp"))
        norms.append(stats.grad_norm.item())
        assert stats.skipped.item() == (poison and step == 1)
        ours.zero_grad()
    states = {n: {k: (part.tensor, part.box) for k, part in kinds.items()} for n, kinds in ours.states().items()}
    return norms, states, model.matrix.detach()


@pytest.mark.parametrize("poison", [False, True], ids=["finite", "inf on one rank"])
@pytest.mark.parametrize(("world", "tp", "cp"), [(2, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2)])
def test_every_layout_makes_the_same_step(ranks, world, tp, cp, poison):
    """With equal replicas the mean over replicas and num_tokens agree; an infinite gradient stops all ranks."""
    twin = Twin()
    norms = []
    for step in range(3):
        if poison and step == 1:
            twin.count += 1
            continue
        norms.append(twin.step(gradients(step)))
    for got, states, local in ranks(spread, world=world, tp=tp, cp=cp, num_tokens=None, poison=poison):
        assert [n for n in got if n < float("inf")] == pytest.approx(norms, rel=1e-12)
        whole = dict(twin.model.named_parameters())
        for name, kinds in states.items():
            inner = twin.optimizer.state[whole[name]]
            for kind, (tensor, box) in kinds.items():
                want = whole[name].detach() if kind == "main" else inner[kind]
                torch.testing.assert_close(tensor, want[box], rtol=1e-11, atol=1e-13)
        rows = states["matrix"]["main"][0].shape[0]
        assert not local[rows:].any(), "padded rows stay zero"


def test_num_tokens_replaces_the_mean_over_replicas(ranks):
    for norms, _, _ in ranks(spread, world=2, tp=1, num_tokens=5.0, poison=False):
        first = torch.cat([g.flatten() for g in gradients(0).values()]).norm().item()
        assert norms[0] == pytest.approx(first / 5, rel=1e-12)


def test_the_kernels_take_a_step_without_waiting_for_tensors(monkeypatch):
    """Nothing on the way of `step` asks a tensor for its value."""
    model = Net(torch.float32)
    ours = trained(model)
    give(model, gradients(0))
    tokens = torch.tensor(3.0)

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    ours.step(num_tokens=tokens, loss_scale=2.0)
