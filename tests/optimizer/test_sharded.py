"""The optimizer over flat buffers against its plain twin, AdamW over `main_grad`."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from tests.optimizer.fake_shard import FakeShard
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
NO_CLIP = OptimizerConfig(lr=0.1, weight_decay=0.3, clip_grad=0.0)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Net(nn.Module):
    """Decays: `first`, `second`. Does not: `scale`, `wide.bias`. Sizes are multiples of 64 unless `ragged`."""

    def __init__(self, dtype=torch.float32, ragged=False):
        super().__init__()
        random, odd = torch.Generator().manual_seed(2), int(ragged)

        def made(*shape):
            return nn.Parameter(torch.randn(shape, generator=random).to(dtype))

        self.first = made(64, 33 + odd)
        self.scale = made(64 + 3 * odd)
        self.second = made(5 + odd, 128 - odd)
        self.wide = nn.Module()
        self.wide.bias = made(2, 32)


def give(model, step, factor=1.0):
    random = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.main_grad.copy_(torch.randn(p.shape, generator=random) * factor)


def plain(dtype, config=CONFIG, ragged=False):
    model = Net(dtype, ragged)
    return model, AdamW(model, ALONE, config, grad_sync=PerParameterGradSync(model, ALONE))


def flat(dtype, config=CONFIG, ragged=False, **shard):
    model = Net(dtype, ragged)
    return model, ShardedAdamW(FakeShard(model, **shard), config)


def equal(a, b, exact=True):
    """Parameters of models, or states of optimizers, are the same."""
    states = [{(n, k): part.tensor for n, kinds in o.states().items() for k, part in kinds.items()} for o in (a, b)]
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        if exact:
            assert torch.equal(tensor, states[1][key]), key
        else:
            torch.testing.assert_close(tensor, states[1][key], msg=str(key))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_are_those_of_the_plain_twin(dtype):
    (model, ours), (twin_model, twin) = flat(dtype), plain(dtype)
    for step in range(5):
        assert ours.learning_rate == twin.learning_rate
        norms = []
        for net, optimizer in ((model, ours), (twin_model, twin)):
            give(net, step, 7 * 16.0)
            stats = optimizer.step(num_tokens=torch.tensor(7.0), loss_scale=16.0)
            norms.append(stats.grad_norm.item())
            assert not stats.skipped and not stats.found_inf
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        equal(ours, twin, exact=step == 0 or dtype != torch.float64)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12 if dtype == torch.float64 else 0, atol=0)
    assert ours.step_count == 5 and ours.skipped_steps == 0 and ours.shard.published == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("buckets", [None, [["second", "wide.bias"], ["scale"], ["first"]]], ids=["1", "3"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_cut_gives_the_same_bits(dtype, ranks, buckets):
    """Also of parameters whose sizes are no multiples of anything."""
    whole, one = flat(dtype, NO_CLIP, ragged=True, buckets=buckets)
    cut = [
        flat(dtype, NO_CLIP, ragged=True, zero_stage=1, ranks=ranks, rank=rank, buckets=buckets)
        for rank in range(ranks)
    ]
    for step in range(3):
        for model, optimizer in [(whole, one), *cut]:
            give(model, step)
            optimizer.step(num_tokens=3)
            optimizer.zero_grad()
    seen = 0
    for _, optimizer in cut:
        for name, kinds in optimizer.states().items():
            for kind, part in kinds.items():
                want = one.states()[name][kind].tensor.reshape(-1)[slice(*part.interval)]
                assert torch.equal(part.tensor, want), (name, kind)
                seen += part.tensor.numel()
    assert seen == 3 * sum(p.numel() for p in whole.parameters())


def test_a_run_before_a_multiple_of_64_is_a_run_by_itself():
    from core.optimizer.state.flat_shard import ElementRun, clip_runs, make_runs

    runs = make_runs([(0, 70, True), (70, 100, True), (100, 110, False), (110, 300, True), (300, 310, True)])
    assert runs == [
        ElementRun(0, 100, True),
        ElementRun(100, 110, False),
        ElementRun(110, 128, True),
        ElementRun(128, 310, True),
    ]
    assert clip_runs(runs, 64, 192) == [
        ElementRun(0, 36, True), ElementRun(36, 46, False), ElementRun(46, 64, True), ElementRun(64, 128, True)
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_gradients_are_widened_chunk_by_chunk(dtype, monkeypatch):
    monkeypatch.setattr("core.optimizer.state.streamed.CHUNK", 640)
    (model, ours) = flat(dtype, NO_CLIP, grad_dtype=torch.bfloat16, ragged=True)
    (other, direct) = flat(dtype, NO_CLIP, ragged=True)
    for step in range(3):
        for net, optimizer in ((model, ours), (other, direct)):
            give(net, step)
            for p in net.parameters():
                p.main_grad.copy_(p.main_grad.bfloat16())
            optimizer.step(num_tokens=3)
            optimizer.zero_grad()
    equal(ours, direct)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "no tokens"])
def test_a_norm_that_is_not_finite_changes_nothing(dtype, bad):
    (model, ours), (other, twin) = flat(dtype), flat(dtype)
    for net, optimizer in ((model, ours), (other, twin)):
        give(net, 0)
        optimizer.step(num_tokens=1)
        optimizer.zero_grad()
    give(model, 1)
    if bad != "no tokens":
        model.wide.bias.main_grad[1, 1] = bad
    stats = ours.step(num_tokens=0 if bad == "no tokens" else 1)
    assert stats.skipped and stats.found_inf and ours.skipped_steps == 1 and ours.step_count == 2
    assert ours.non_finite() == ([] if bad == "no tokens" else ["wide.bias on rank 0"])
    equal(ours, twin)
    ours.zero_grad()
    for net, optimizer in ((model, ours), (other, twin)):  # Adam's own count did not move either
        optimizer.step_count = 2
        give(net, 2)
        optimizer.step(num_tokens=1)
    equal(ours, twin)
    assert ours.non_finite() == ([] if bad == "no tokens" else ["wide.bias on rank 0"]), "until the next one"


@pytest.mark.parametrize("bad", [True, False], ids=["a parameter", "no tokens"])
def test_too_many_skipped_steps_in_a_row_are_an_error(bad):
    model, ours = flat(torch.float32, OptimizerConfig(max_skipped_steps=2))

    def skip():
        give(model, 0)
        if bad:
            model.second.main_grad[0, 3] = float("inf")
        try:
            ours.step(num_tokens=1 if bad else 0)
        finally:
            ours.zero_grad()

    skip()
    give(model, 1)
    ours.step(num_tokens=1)  # a good one between
    ours.zero_grad()
    skip()
    what = "not finite in second on rank 0" if bad else "every gradient is finite, but not their norm"
    with pytest.raises(RuntimeError, match=rf"step 4: 2 steps in a row were skipped, max_skipped_steps=2.*{what}"):
        skip()


def test_gradients_are_used_once():
    model, ours = flat(torch.float32)
    give(model, 0)
    ours.step(num_tokens=1)
    with pytest.raises(ValueError, match=r"step 2: the gradients were used up by step 1; call zero_grad\(\)"):
        ours.step(num_tokens=1)
    ours.shard.zero_grad()  # by whoever: what counts is whether they are new
    give(model, 0)
    ours.step(num_tokens=1)
    assert ours.step_count == 2


def test_gradients_that_nobody_summed_are_summed_first():
    model, ours = flat(torch.float32)
    give(model, 0)
    assert not ours.shard.finished
    ours.step()
    assert ours.shard.finished
    ours.zero_grad()
    assert not ours.shard.finished and not any(p.main_grad.any() for p in model.parameters())


def test_mains_follow_parameters_changed_by_hand():
    model, ours = flat(torch.bfloat16)
    with torch.no_grad():
        model.scale.fill_(3.0)
    ours.reload_parameters()
    ours.step(num_tokens=1)  # no gradient, no decay of one dim
    assert torch.equal(model.scale, torch.full((64,), 3.0, dtype=torch.bfloat16))


def test_one_optimizer_has_one_dtype():
    model = Net()
    model.second.data = model.second.data.double()
    model.scale.data = model.scale.data.bfloat16()  # counts as float32
    with pytest.raises(
        ValueError, match=r"these are of 2: float32 \(first\) and float64 \(second\); build the model"
    ):
        ShardedAdamW(FakeShard(model), CONFIG)


def test_who_decays_can_be_said():
    model = Net()
    other = ShardedAdamW(FakeShard(model), CONFIG, decays=lambda name, _: name == "scale")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    other.step(num_tokens=1)  # no gradients: decay only
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"scale"}


def test_the_kernels_take_a_step_without_waiting_for_tensors(monkeypatch):
    """Nothing on the way of `step` asks a tensor for its value, where the device is an accelerator."""
    model, ours = flat(torch.float32)
    ours._watch._eager = False
    give(model, 0)
    tokens = torch.tensor(3.0)

    def refuse(*_):
        raise AssertionError("a tensor's value was read")

    for name in ("item", "__bool__", "__float__", "__int__", "tolist", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    stats = ours.step(num_tokens=tokens, loss_scale=2.0)
    monkeypatch.undo()
    other, twin = plain(torch.float32)
    give(other, 0)
    assert stats.grad_norm.item() == pytest.approx(twin.step(tokens, 2.0).grad_norm.item(), rel=1e-6)
    ours.zero_grad()
    give(model, 0)
    model.first.main_grad[3, 3] = float("nan")
    ours.step()
    assert ours.non_finite() == ["first on rank 0"]


class Copies(TorchDispatchMode):
    """Names of the copies made inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "copy_" in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_16_bit_weights_are_rounded_in_one_pass_over_all_buckets():
    names = [["first", "scale"], ["second"], ["wide.bias"]]
    model, optimizer = flat(torch.bfloat16, buckets=names)
    give(model, 1)
    with Copies() as copies:
        optimizer.step()
    assert copies.names.count("aten::_foreach_copy_") == 1
    assert "aten::copy_" not in copies.names
    for name, p in model.named_parameters():
        main = optimizer.states()[name]["main"].tensor
        assert torch.equal(p, main.view(p.shape).to(torch.bfloat16)), name
