"""SGD and Muon beside torch's own, the loss scale of float16, states that go out and come back."""

import copy
import pickle

import pytest
import torch
from torch import nn

from core.optimizer import (
    OptimizerConfig,
    ShardedAdamW,
    ShardedMuon,
    ShardedSGD,
    build_optimizer,
    sharded_state_dict,
)
from core.optimizer.config import OPTIMIZERS
from core.optimizer.step.loss_scale import LossScale
from core.pipeline.run.step import scale_like
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import ALONE, CONFIG, Net, equal, flat, give, plain

CPU = torch.device("cpu")


def torch_step(model, optimizer, step, clip):
    give(model, step)
    for p in model.parameters():
        p.grad = p.main_grad.to(p.dtype)
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def with_grads(model):
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    return model


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sgd_is_torchs(dtype, momentum):
    config = OptimizerConfig(optimizer="sgd", lr=0.1, momentum=momentum, weight_decay=0.2, clip_grad=0.5)
    model, twin = Net(dtype), with_grads(Net(dtype))
    ours = build_optimizer(FakeShard(model), config)
    decayed = [twin.first, twin.second]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": [twin.scale, twin.wide.bias]}]
    other = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    for step in range(4):
        give(model, step)
        assert not ours.step(num_tokens=1).skipped
        ours.zero_grad()
        torch_step(twin, other, step, 0.5)
    assert isinstance(ours, ShardedSGD)
    assert set(ours.states()["first"]) == ({"main", "momentum_buffer"} if momentum else {"main"})
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


class Stacked(nn.Module):
    """A model with a stack: only its matrices are Muon's."""

    stacks = {"layers": 2}

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(16, 8, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for _ in range(2))
        self.layers[1].wide = nn.Parameter(torch.randn(2, 4, 8).to(dtype))
        self.head = nn.Linear(8, 16, bias=False, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muon_is_torchs_on_hidden_matrices_and_adamw_elsewhere(dtype):
    config = OptimizerConfig(optimizer="muon", lr=0.01, momentum=0.95, weight_decay=0.1, clip_grad=0.0)
    model, twin = Stacked(dtype), with_grads(Stacked(dtype).float())
    ours = build_optimizer(FakeShard(model), config)
    hidden = [twin.layers[0].weight, twin.layers[1].weight]
    experts = [nn.Parameter(matrix) for matrix in twin.layers[1].wide.detach()]  # the same memory
    muon = torch.optim.Muon([*hidden, *experts], lr=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    vectors = [twin.layers[0].bias, twin.layers[1].bias]
    groups = [{"params": [twin.embedding.weight, twin.head.weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for step in range(3):
        give(model, step)
        stats = ours.step(num_tokens=0 if step == 1 else 1)
        assert stats.skipped == (step == 1)
        ours.zero_grad()
        if step != 1:
            give(twin, step)
            for matrix, gradient in zip(experts, twin.layers[1].wide.main_grad, strict=True):
                matrix.grad = gradient
            torch_step(twin, muon, step, float("inf"))
            adamw.step()
    assert isinstance(ours, ShardedMuon)
    for name, kinds in ours.states().items():
        inside = name.startswith("layers") and "bias" not in name
        assert set(kinds) == {"main"} | ({"momentum_buffer"} if inside else {"exp_avg", "exp_avg_sq"}), name
        torch.testing.assert_close(kinds["main"].tensor, twin.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def muons(model, **options):
    with pytest.warns(UserWarning, match="ShardedMuon: AdamW updates .* hidden=lambda name, layout"):
        ours = ShardedMuon(FakeShard(model), OptimizerConfig(optimizer="muon", clip_grad=0.0, **options))
    return ours, {name for name, kinds in ours.states().items() if "momentum_buffer" in kinds}


def test_muon_without_stacks_goes_by_kind():
    model = nn.ModuleDict({"wte": nn.Embedding(8, 8), "hidden": nn.Linear(8, 8), "lm_head": nn.Linear(8, 8)})
    assert muons(model)[1] == {"hidden.weight"}
    named_otherwise = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    assert muons(named_otherwise)[1] == {"1.weight"}, "the last matrix gives the logits"
    said = ShardedMuon(FakeShard(model), OptimizerConfig(), hidden=lambda name, _: name.startswith("wte"))
    assert {name for name, kinds in said.states().items() if "momentum_buffer" in kinds} == {"wte.weight"}


def test_muon_knows_t5s_tables_and_outputs():
    from transformers import T5Config, T5ForConditionalGeneration

    facts = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    _, found = muons(T5ForConditionalGeneration(T5Config(**facts, tie_word_embeddings=False)))
    assert found and all(".block." in name and "relative_attention_bias" not in name for name in found)


@pytest.mark.parametrize("muon_lr", ["original", "match_rms_adamw"])
def test_muon_takes_convolutions_as_out_times_the_rest(muon_lr):
    torch.manual_seed(0)
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 16, 3, bias=False), "head": nn.Linear(16, 4)}).double()
    matrix = nn.Parameter(model["conv"].weight.detach().clone().view(16, 27))
    ours, found = muons(model, muon_lr=muon_lr, lr=0.1)
    assert found == {"conv.weight"} and ours.param_groups[0]["momentum"] == 0.95
    torchs = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.01, adjust_lr_fn=muon_lr)
    for step in range(2):
        give(model, step)
        matrix.grad = model["conv"].weight.main_grad.clone().view(16, 27)
        ours.step(num_tokens=1)
        ours.zero_grad()
        torchs.step()
        assert torch.equal(model["conv"].weight.detach().view(16, 27), matrix.detach())


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("name, momentum", [("sgd", 0.0), *((name, None) for name in OPTIMIZERS)])
def test_the_configuration_knows_the_kinds_of_states(name, momentum, ema_decay):
    config = OptimizerConfig(optimizer=name, momentum=momentum, ema_decay=ema_decay, muon_except="second")
    states = build_optimizer(FakeShard(Net()), config).states().values()
    assert {kind for kinds in states for kind in kinds} - {"main"} == {*config.state_kinds}


def test_muon_wants_main_weights():
    with pytest.raises(ValueError, match="main_params=False; use main_params=True"):
        build_optimizer(FakeShard(Net()), OptimizerConfig(optimizer="muon", main_params=False))


def test_muon_restarts_bit_for_bit():
    config = OptimizerConfig(lr=0.01)
    model, fresh = Stacked(), Stacked()
    ours = ShardedMuon(FakeShard(model), config)
    for step in range(2):
        give(model, step)
        ours.step(num_tokens=1)
        ours.zero_grad()
    again = ShardedMuon(FakeShard(fresh), config)
    again.load_states(ours.states(), 2)
    for optimizer, net in ((ours, model), (again, fresh)):
        give(net, 5)
        optimizer.step(num_tokens=1)
    equal(ours, again)


def test_the_loss_scale_grows_after_good_steps_and_halves_after_an_overflow():
    scale = LossScale(4.0, 2, CPU)
    first, found = scale.value, []
    for bad in (False, False, False, True, False, False, True, True, True, True, True):
        scale.update(torch.tensor(bad))
        found.append(scale.value.item())
    assert found == [4, 8, 8, 4, 4, 8, 4, 2, 1, 1, 1]
    assert first.item() == 4, "a value given away does not change"


def test_float16_steps_use_and_move_the_loss_scale():
    config = OptimizerConfig(lr=0.1, clip_grad=0.5, initial_loss_scale=8.0, loss_scale_window=2)
    model, ours = flat(torch.float16, config)
    twin_model, twin = flat(torch.float32, config)
    ours.load_states({n: dict(k) for n, k in twin.states().items()}, 0)  # from the same float32 values
    assert twin.loss_scale == 1.0
    scales = []
    for step in range(4):
        scales.append(ours.loss_scale.item())
        give(model, step, (3 * ours.loss_scale).item())
        give(twin_model, step, 3)
        if step == 2:
            model.first.main_grad[0, 0] = float("inf")
            twin_model.first.main_grad[0, 0] = float("inf")
        ours.step(num_tokens=3)
        twin.step(num_tokens=3)
        ours.zero_grad()
        twin.zero_grad()
    assert scales == [8, 8, 16, 8] and ours.skipped_steps == 1
    equal(ours, twin)
    saved = ours.sharded_state_dict()
    counts = {key: item.data for key, item in saved.items() if key != "states"}
    assert counts["loss_scale"] == {"value": 8.0, "good_steps": 1}
    _, again = flat(torch.float16, config)
    again.load_state_dict(counts)
    assert again.loss_scale.item() == 8 and again.step_count == 4 and again.skipped_steps == 1


def half(**more):
    return flat(torch.float16, OptimizerConfig(lr=0.1, clip_grad=0.0, initial_loss_scale=8.0, **more))


def ones(like):
    return torch.ones((), requires_grad=True, dtype=like)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda scale: ones(torch.float64) * scale,
        lambda scale: scale * ones(torch.float64),
        lambda scale: ones(torch.float16) * scale.to(torch.float16),
        lambda scale: ones(torch.float32) * scale.float().detach(),
        lambda scale: torch.mul(ones(torch.float64), scale / 4),
        lambda scale: scale_like(ones(torch.float64), scale),
        lambda scale: torch.autograd.backward([ones(torch.float64)], [scale.expand(())]),
    ],
)
def test_a_loss_multiplied_by_the_loss_scale_is_noticed(multiply, recwarn):
    model, ours = half()
    multiply(ours.loss_scale)
    give(model, 0, 8)
    ours.step(num_tokens=1)
    assert not recwarn


def test_a_loss_scale_that_is_only_looked_at_is_told():
    model, ours = half()
    log = [ours.loss_scale.item(), f"{ours.loss_scale:.0f}", ours.loss_scale.log2(), ours.loss_scale > 4]
    assert log == [8, "8", 3, True]
    give(model, 0, 8)
    with pytest.warns(UserWarning, match=r"read for a log only, call step\(loss_scale=1.0\)"):
        ours.step(num_tokens=1)
    ours.zero_grad()
    give(model, 1, 8)
    ours.step(num_tokens=1)  # once


def test_the_loss_scale_travels_as_a_plain_tensor():
    copied = pickle.loads(pickle.dumps(half()[1].loss_scale))
    assert type(copied) is torch.Tensor and copied.item() == 8


def test_overflows_do_not_move_a_schedule_of_deepspeeds():
    """DeepSpeed calls its scheduler after updates that were made; ours count every step."""
    options = {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
    deepspeeds = half(lr_schedule="WarmupLR", lr_schedule_options=options)
    counting = half(lr_schedule="linear", lr_warmup_steps=4, lr_decay_steps=9)
    rates = []
    for model, ours in (deepspeeds, counting):
        rates.append([])
        for step in range(4):
            rates[-1].append(ours.learning_rate)
            give(model, step, (ours.loss_scale * 1).item())
            if step == 1:
                model.first.main_grad[0, 0] = float("inf")
            ours.step(num_tokens=1)
            ours.zero_grad()
        assert ours.skipped_steps == 1
    assert rates[0] == pytest.approx([0.0, 0.0, 0.0, 0.025]) and rates[1] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    _, again = half(lr_schedule="WarmupLR", lr_schedule_options=options)
    again.load_states(deepspeeds[1].states(), 4, skipped_steps=1)
    assert again.learning_rate == deepspeeds[1].learning_rate == pytest.approx(0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_state_of_before_starts_adam_anew_and_leaves_weights(dtype):
    """As torch.optim's: Lightning, LR finders and warm restarts load the first state again."""
    model, ours = flat(dtype, OptimizerConfig(lr=0.1, clip_grad=0.0))
    first = copy.deepcopy(ours.state_dict())
    for step in range(3):
        give(model, step)
        ours.step(num_tokens=1)
        ours.zero_grad()
    trained = [p.detach().clone() for p in model.parameters()]
    ours.load_state_dict(first)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))
    fresh, other = flat(dtype, OptimizerConfig(lr=0.1, clip_grad=0.0))
    for p, q in zip(fresh.parameters(), trained, strict=True):
        p.data.copy_(q)
    for net, optimizer in ((model, ours), (fresh, other)):
        give(net, 7)
        optimizer.step(num_tokens=1)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_groups_and_states_cannot_do_is_refused():
    model, ours = flat(torch.float32, OptimizerConfig(lr=0.1, clip_grad=0.0))
    with pytest.raises(ValueError, match="none can be put in or taken out"):
        ours.state.clear()
    for name in ("amsgrad", "maximize", "nesterov"):
        ours.param_groups[0][name] = True
        give(model, 0)
        with pytest.raises(ValueError, match=rf"param_groups\[0\]\['{name}'\] = True does nothing here"):
            ours.step(num_tokens=1)
        ours.zero_grad()
        ours.param_groups[0][name] = False
    ours.param_groups[0]["params"].pop()
    give(model, 0)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\] had \d parameters and has \d"):
        ours.step(num_tokens=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_restart_goes_on_bit_for_bit(dtype, zero_stage):
    cut = {"zero_stage": zero_stage, "ranks": 1 + zero_stage, "rank": zero_stage}
    (model, ours), (fresh, again) = flat(dtype, ragged=True, **cut), flat(dtype, ragged=True, **cut)
    for step in range(4):
        give(model, step)
        ours.step(num_tokens=0 if step == 1 else 3)  # one skipped step among them
        ours.zero_grad()
    saved = {n: {k: part.tensor.clone() for k, part in kinds.items()} for n, kinds in ours.states().items()}
    again.load_states(saved, ours.step_count, skipped_steps=ours.skipped_steps)
    assert again.shard.published == 1
    for net, optimizer in ((model, ours), (fresh, again)):
        give(net, 5)
        optimizer.step(num_tokens=3)
    equal(ours, again)
    assert again.step_count == 5 and again.skipped_steps == 1
    for b, c in zip(ours.shard.buffers, again.shard.buffers, strict=True):
        assert torch.equal(b.weights, c.weights)


def test_states_of_the_plain_optimizer_fit():
    model, twin = plain(torch.bfloat16)
    give(model, 0)
    twin.step(num_tokens=1)
    _, ours = flat(torch.bfloat16)
    ours.load_states(twin.states(), 1)
    equal(ours, twin)


def test_load_refuses_what_is_not_this_ranks():
    _, ours = flat(torch.float32, CONFIG)
    states = ours.states()
    with pytest.raises(ValueError, match=r"2 parameters given for 4; not on both sides: second, wide.bias"):
        ours.load_states({n: states[n] for n in ("first", "scale")}, 1)
    with pytest.raises(ValueError, match=r"scale has .* but not exp_avg_sq; give all"):
        ours.load_states({**states, "scale": {k: states["scale"][k] for k in ("main", "exp_avg")}}, 1)
    _, half = flat(torch.float32, CONFIG, zero_stage=1, ranks=2)
    with pytest.raises(ValueError, match=r"main of first is \(64, 33\), elements None; this rank holds \(1472,\)"):
        half.load_states({n: states[n] for n in half.states()}, 1)
    assert ours.step_count == 0


def test_states_exist_before_the_first_step_and_are_live():
    model, ours = flat(torch.float32)
    part = ours.states()["first"]["exp_avg"]
    assert not part.tensor.any() and part.box == (slice(0, 64), slice(0, 33)) and part.interval is None
    give(model, 0)
    ours.step(num_tokens=1)
    assert part.tensor.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_its_main_is_saved_once(dtype):
    for stage in (0, 1):
        _, ours = flat(dtype, zero_stage=stage)
        kinds = set(ours.sharded_state_dict()["states"]["first"])
        assert kinds == {"exp_avg", "exp_avg_sq"} | ({"main"} if dtype == torch.bfloat16 else set())


def test_a_parameter_without_memory_is_not_saved_as_if_it_had_any():
    from core.dist_checkpointing.state.mapping import sharded_state_dict as of_module

    model = Net()
    shard = FakeShard(model, zero_stage=3)
    with torch.no_grad():
        model.second.data = torch.full((1, 1), float("nan")).expand(5, 128)
    with pytest.raises(ValueError, match=r"second has 4 bytes of memory for 2560: it is sharded \(ZeRO-3\); take"):
        of_module(model, ALONE)
    found = sharded_state_dict(shard)
    assert found["second"][0].data.shape == (5, 128) and set(found) == {"first", "scale", "second", "wide.bias"}


def test_the_configuration_says_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"optimizer='shampoo' is unknown; known: adamw, adamw8bit, sgd, muon, lion, lamb, adafactor"
    ) as found:
        OptimizerConfig(
            optimizer="shampoo", momentum=1.0, loss_scale_window=0, initial_loss_scale=0, max_skipped_steps=-1
        )
    for name in ("momentum=1.0", "loss_scale_window=0", "initial_loss_scale=0", "max_skipped_steps=-1"):
        assert name in str(found.value)
    assert isinstance(build_optimizer(FakeShard(Net()), OptimizerConfig()), ShardedAdamW)
