"""AdamW with moments of 8 bits beside its plain twin: the same numbers, every cut, states, memory."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.optimizer import Offload, OptimizerConfig, ShardedAdamW8bit, adamw, build_optimizer
from core.optimizer.state.quantized import dequantize, dynamic_map, gaps, quantize
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from core.training.log.memory import expected_of
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import Net, equal, give
from tests.parity.pipelines import VOCAB, S, batch, config, spec
from tests.parity.test_muon import On, train
from tests.parity.whole import assert_same
from tests.twins import adamw8bit as twins

CONFIG = OptimizerConfig(optimizer="adamw8bit", lr=0.01, weight_decay=0.2, clip_grad=0.5, adam_beta2=0.98)


class Wide(nn.Module):
    """Two matrices that are quantized, the second `ragged`: it ends inside a block; and what is too small for it."""

    def __init__(self, dtype=torch.float32, ragged=False):
        super().__init__()
        self.small = Net(dtype, ragged)
        random = torch.Generator().manual_seed(4)
        for name, shape in (("first", (64, 96)), ("second", (67, 65) if ragged else (3, 32, 64))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=random).to(dtype)))


def made(dtype=torch.float32, ragged=False, offload=None, config=CONFIG, **cut):
    model = Wide(dtype, ragged)
    return model, build_optimizer(FakeShard(model, **cut), config, offload=offload)


def stepped(pairs, steps=3, first=0):
    for step in range(first, first + steps):
        for model, optimizer in pairs:
            give(model, step)
            optimizer.step(num_tokens=1e3)  # so small that nobody clips: a part does not know the whole norm
            optimizer.zero_grad()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_codes_are_the_nearest_values_and_quantizing_again_changes_nothing(dtype, signed):
    assert torch.equal(torch.tensor(dynamic_map(signed=signed)), twins.values(signed).float())
    x = torch.randn(64 * 40, dtype=dtype) * torch.logspace(-9, 3, 64 * 40, dtype=dtype)
    x[:64] = 0
    if not signed:
        x = x.square()
    codes, scales = quantize(x, signed=signed)
    found = dequantize(codes, scales, signed=signed)
    torch.testing.assert_close(found, twins.rounded(x.view(1, -1).repeat(2, 1), signed)[0], rtol=1e-6, atol=0)
    again = quantize(found, signed=signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    assert signed or torch.equal(found == 0, x == 0), "Adam divides by its root"
    largest = x.view(-1, 64).abs().amax(1)
    assert torch.equal(found.view(-1, 64).abs().amax(1), largest), "and its largest element is exact"
    width = 0.9 / (64 if signed else 128)
    assert ((found - x).abs() <= 0.51 * width * largest.repeat_interleave(64)).all(), "half of the widest step"


def test_gaps_are_what_spans_leave():
    assert gaps([(64, 128), (128, 256)], 320) == [(0, 64), (256, 320)]
    assert gaps([], 64) == [(0, 64)] and gaps([(0, 64)], 64) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_steps_are_those_of_the_plain_twin(dtype, monkeypatch):
    monkeypatch.setattr("core.optimizer.state.streamed.CHUNK", 640)
    (model, ours), twin_model = made(dtype), Wide(dtype)
    assert isinstance(ours, ShardedAdamW8bit)
    bias = twin_model.small.wide.bias
    decayed = [p for p in twin_model.parameters() if p.dim() > 1 and p is not bias]
    vectors = [p for p in twin_model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": [*vectors, bias]}]
    twin = twins.AdamW8bit(groups, lr=0.01, betas=(0.9, 0.98))
    for p in twin_model.parameters():
        p.main_grad = torch.zeros_like(p)
    for step in range(5):
        skipped = step == 2
        give(model, step, torch.nan if skipped else 1.0)
        assert ours.step(num_tokens=1).skipped == skipped
        ours.zero_grad()
        if not skipped:
            give(twin_model, step)
            for p in twin_model.parameters():
                p.grad = p.main_grad.clone()
            torch.nn.utils.clip_grad_norm_(twin_model.parameters(), 0.5)
            twin.step()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    for (name, p), q in zip(model.named_parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=name)
        for kind in ("exp_avg", "exp_avg_sq"):
            found, want = ours.states()[name][kind].tensor, twin.state[q][kind]
            if dtype == torch.float64:
                torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-14)
            else:  # a value between two codes may have either
                assert torch.isclose(found, want, rtol=1e-4, atol=1e-9).float().mean() > 0.999


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_cut_and_offload_gives_the_same_bits(dtype, ragged, tmp_path):
    whole, one = made(dtype, ragged)
    disk = Offload(kind="disk", fraction=1.0, directory=tmp_path)
    offloaded = [made(dtype, ragged, offload) for offload in (Offload(fraction=0.5), disk)]
    cut = [made(dtype, ragged, zero_stage=1, ranks=3, rank=rank) for rank in range(3)]
    stepped([(whole, one), *offloaded, *cut])
    for _, optimizer in offloaded:
        equal(one, optimizer)
    for _, optimizer in cut:
        for name, kinds in optimizer.states().items():
            for kind, part in kinds.items():
                want = one.states()[name][kind].tensor.reshape(-1)[slice(*part.interval)]
                assert torch.equal(part.tensor, want), (name, kind)
    far, near = offloaded[0][1].memory(), offloaded[1][1].memory()
    assert sum(far) == sum(near) == sum(one.memory()) and near[0] == 0 < far[0]


def test_without_main_weights_and_with_an_average():
    """Stochastic rounding: its bits belong to an element, so cut and offloaded ones are the same."""
    options = replace(CONFIG, main_params=False, ema_decay=0.9)
    whole, one = made(torch.bfloat16, config=options)
    offloaded = made(torch.bfloat16, offload=Offload(fraction=0.5), config=options)
    cut, half = made(torch.bfloat16, config=options, zero_stage=1, ranks=2, rank=1)
    stepped([(whole, one), offloaded, (cut, half)])
    equal(one, offloaded[1])
    for name, kinds in half.states().items():
        for kind, part in kinds.items():
            assert torch.equal(part.tensor, one.states()[name][kind].tensor.reshape(-1)[slice(*part.interval)])
    with one.averaged():
        assert whole.first.isfinite().all()


@pytest.mark.parametrize("by", ["state_dict", "states"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_restart_goes_on_bit_for_bit(dtype, by):
    (model, ours), (fresh, again) = made(dtype, ragged=True), made(dtype, ragged=True)
    stepped([(model, ours)])
    fresh.load_state_dict(model.state_dict())
    if by == "state_dict":
        again.load_state_dict(ours.state_dict())
    else:
        again.load_states(ours.states(), ours.step_count)
    stepped([(model, ours), (fresh, again)], first=3)
    equal(ours, again)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))


def test_what_is_shown_cannot_be_written_to():
    model, ours = made()
    stepped([(model, ours)])
    shown = ours.state[model.first]["exp_avg"]
    assert shown.abs().sum() > 0 and shown.shape == (64, 96)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        shown.zero_()


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
    model = Wide(torch.float16)
    facts = {"lr": 0.5, "clip_grad": 0.0, "initial_loss_scale": 8.0}
    config = OptimizerConfig(optimizer="adamw8bit", **facts)
    ours = ShardedAdamW8bit(FakeShard(model), config, groups=[{"names": "small.*", "lr": 0.25}])
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
    assert ours.loss_scale.item() == 4 and not torch.equal(model.first, before)


@pytest.mark.parametrize("dtype, main", [(torch.float32, 0), (torch.bfloat16, 4)], ids=str)
def test_moments_take_two_bytes_and_an_eighth(dtype, main):
    model = nn.Linear(128, 512, bias=False, dtype=dtype)
    ours = build_optimizer(FakeShard(model), CONFIG)
    assert ours.memory() == (int((main + 2 + 8 / 64) * 128 * 512), 0)
    (buffer,) = ours.shard.buffers
    buffer.dtype, buffer.grad_dtype = dtype, torch.float32
    assert expected_of(ours.shard, ours).optimizer == ours.memory()[0]


def losses(name, steps):
    ps = ParallelState.single("cpu")
    facts = config(num_layers=2, hidden_size=64, ffn_hidden_size=96, params_dtype=torch.float32)
    model = GPTModel(facts, spec(), VOCAB, S, parallel=ps, seed=1)
    shard = DataParallel(model, ps)
    optimizer = build_optimizer(shard, OptimizerConfig(optimizer=name, lr=2e-3))
    executor = SingleStage(model, ps=ps, num_microbatches=4, grad_sync=shard, seed=1)
    found = []
    for _ in range(steps):
        result = executor.step(batch(4), next_token_loss)
        found.append(float(result.loss_sum / result.num_tokens))
        optimizer.step(num_tokens=result.num_tokens)
        optimizer.zero_grad()
    return torch.tensor(found), optimizer.memory()[0]


@pytest.mark.parametrize("steps, falls", [(20, 1.2), pytest.param(60, 2, marks=pytest.mark.full)])
def test_training_stays_close_to_adamws(steps, falls):
    (ours, narrow), (plain, wide) = losses("adamw8bit", steps), losses("adamw", steps)
    assert plain[-1] < plain[0] / falls and narrow < wide / 2 and not torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, rtol=0.03, atol=0.03)


def quantized(on, steps, config=CONFIG, **files):
    """`train` where parameters of 64 elements are quantized already: these models are small."""
    with patch.object(adamw, "LEAST_NUMEL", 64):
        return train(on, steps, config=config, **files)


def test_zero_3_and_a_pipeline_have_the_numbers_of_one_process(ranks):
    (want,) = ranks(quantized, On(), 3, world=1)
    (unquantized,) = ranks(train, On(), 3, config=CONFIG, world=1)
    with pytest.raises(AssertionError):
        assert_same(unquantized, want)
    for on in (On(3), On(1, pp=2, schedule="zb-v")):
        for found in ranks(quantized, on, 3, world=2):
            assert_same(found, want)


@pytest.mark.full
def test_other_stages_and_tensor_ranks_have_the_numbers_of_one_process(ranks):
    (want,) = ranks(quantized, On(), 3, world=1)
    for on in (On(1), On(2)):
        for found in ranks(quantized, on, 3, world=2):
            assert_same(found, want)
    # tensor ranks cut rows, and so other blocks: a rounding of the moments apart
    near = ranks(quantized, On(3, 4, tp=2, sp=True), 3, world=4)
    for name, weight in want.items():
        torch.testing.assert_close(near[0][name], weight, rtol=0.02, atol=3e-3)
    for found in ranks(quantized, On(tp=2, sp=True), 3, world=2):
        assert_same(found, near[0])


@pytest.mark.full
def test_experts_have_the_numbers_of_one_process(ranks):
    (want,) = ranks(quantized, On(style="moe"), 3, world=1)
    for on in (On(1, expert=2, style="moe"), On(3, style="moe")):
        for found in ranks(quantized, on, 3, world=2):
            assert_same(found, want)


def test_a_checkpoint_opens_under_any_layout_and_as_adamws(ranks, tmp_path):
    (want,) = ranks(quantized, On(), 3, world=1)
    ranks(quantized, On(3), 2, save=str(tmp_path / "cut"), world=2)
    ranks(quantized, On(1, tp=2), 2, save=str(tmp_path / "tensor"), world=2)
    (found,) = ranks(quantized, On(), 1, load=str(tmp_path / "cut"), world=1)
    assert_same(found, want)
    plain = OptimizerConfig(**{**vars(CONFIG), "optimizer": "adamw"})
    for load, options in (("tensor", {}), ("cut", {"config": plain})):
        for found in ranks(quantized, On(2), 1, load=str(tmp_path / load), world=2, **options):
            for name, weight in want.items():
                torch.testing.assert_close(found[name], weight, rtol=0.02, atol=3e-3)
