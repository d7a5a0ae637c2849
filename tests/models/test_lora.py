"""LoRA over every layout: the plain twin's loss and gradients, frozen weights, refusals, folding."""

import pytest
import torch

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.models.lora import LoraConfig, apply_lora, lora_state_dict, merge_lora
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import layout_of
from tests.models import lora as small
from tests.models.lora import LORA, M, adapted, sharded_step, twin
from tests.parity.pipelines import VOCAB, S, batch, config, spec
from tests.parity.shards import whole_gradients
from tests.parity.whole import assembled
from tests.states import state

TOLERANCE = 1e-10


def compare(sizes, schedule, policy, zero, style):
    """What differs from the twin, on this rank."""
    ps = state(pp=1 if schedule == "none" else 2, **sizes)
    shard, result = sharded_step(ps, schedule, policy, zero, style=style)
    want, loss = twin(M * ps.size("dp"), style)
    told = [] if abs(result.loss.item() - loss) < TOLERANCE * loss else [f"loss {result.loss.item()} of {loss}"]
    found = whole_gradients(shard)
    if found.keys() != want.keys():
        told.append(f"gradients of {sorted(found.keys() ^ want.keys())[:2]}")
    for name, got in found.items():
        scale, error = want[name].abs().max(), (got - want[name]).abs().max()
        if not (scale > 0 and error <= TOLERANCE * scale):
            told.append(f"{name}: error {error:.2e} of {scale:.2e}")
    return told


CASES = [  # world, sizes, schedule, recompute, ZeRO
    (1, {}, "none", "none", 0, "llama"),
    (1, {}, "none", "layer", 1, "gpt2"),
    (2, {"tp": 2}, "none", "none", 1, "llama"),
    pytest.param(2, {"tp": 2}, "none", "layer", 1, "gpt2", marks=pytest.mark.full),
    (2, {"tp": 2, "sp": True}, "none", "none", 1, "llama"),
    (2, {"tp": 2, "sp": True}, "none", "layer", 0, "gpt2"),
    (2, {}, "zb-v", "none", 0, "llama"),
    (2, {}, "zb-v", "layer", 1, "gpt2"),
    (2, {}, "none", "none", 0, "llama"),
    (2, {}, "none", "none", 1, "llama"),
    pytest.param(2, {}, "none", "layer", 2, "llama", marks=pytest.mark.full),
    (2, {}, "none", "layer", 3, "llama"),
    (4, {"tp": 2, "sp": True}, "zb-v", "stage", 1, "llama"),
    (4, {"tp": 2, "sp": True}, "none", "selective", 3, "llama"),
    pytest.param(4, {}, "1f1b", "layer", 2, "llama", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "sizes", "schedule", "policy", "zero", "style"), CASES)
def test_the_twins_loss_and_gradients(ranks, world, sizes, schedule, policy, zero, style):
    told = ranks(compare, world=world, sizes=sizes, schedule=schedule, policy=policy, zero=zero, style=style)
    assert not any(told), told


def plain_step(sizes):
    """Gradients of a plain loop's backward, without a DataParallel, put together."""
    ps = state(**sizes)
    (model,) = adapted(ps).values()
    rows = batch(M)
    model(rows["tokens"], labels=rows["labels"]).sum().backward()
    named = dict(model.named_parameters())
    assert {n for n, p in named.items() if p.grad is not None} == {n for n in named if ".adapter.lora_" in n}
    gradients = {n: p.grad for n, p in named.items() if p.requires_grad}
    return assembled(gradients, {n: layout_of(named[n]) for n in gradients}, ps)


@pytest.mark.parametrize("sp", [False, True])
def test_a_plain_loop_sums_what_is_partial(ranks, sp):
    want, _ = twin(M)
    for found in ranks(plain_step, {"tp": 2, "sp": sp}, world=2):
        assert found.keys() == want.keys()
        for name, got in found.items():
            assert (got - want[name]).abs().max() <= TOLERANCE * want[name].abs().max(), name


def first_values(sizes, schedule):
    ps = state(**sizes)
    stages = adapted(ps, small.placement_of(schedule))
    named = {n: p for stage in stages.values() for n, p in stage.named_parameters() if ".lora_" in n}
    return assembled(named, {n: layout_of(p) for n, p in named.items()}, ps)


@pytest.mark.parametrize(("sizes", "schedule"), [({"tp": 2, "sp": True}, "none"), ({"pp": 2}, "zb-v")])
def test_first_values_are_the_same_on_every_layout(ranks, sizes, schedule):
    want = first_values({}, "none")
    for found in ranks(first_values, sizes, schedule, world=2):
        assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    bound = 1 / 16**0.5
    a = want["decoder.layers.0.mlp.linear_fc1.adapter.lora_A"]
    assert a.abs().max() <= bound and a.std() > bound / 3, "Kaiming-uniform"


def test_nothing_changes_at_first(single):
    plain, adapted_model = (GPTModel(config(), spec(), VOCAB, S, parallel=single, seed=5) for _ in range(2))
    apply_lora(adapted_model, LORA)
    tokens = batch(M)["tokens"]
    assert torch.equal(plain(tokens), adapted_model(tokens))


def folded(sizes, zero):
    """(logits with adapters, logits once they are folded in, names that are left) after a step of training."""
    ps = state(**sizes)
    stages = adapted(ps)
    model = stages[0]
    if zero is not None:
        shard = DataParallel(stages, ps, zero_stage=zero)
        optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-2))
        rows = batch(M)
        model(rows["tokens"], labels=rows["labels"]).sum().backward()
        optimizer.step()
    model.eval()
    tokens = batch(M)["tokens"]
    with torch.no_grad():
        before = model.gather_logits(model(tokens))
        merge_lora(stages)
        after = model.gather_logits(model(tokens))
    return before, after, [name for name, _ in model.named_parameters() if "adapter" in name]


@pytest.mark.parametrize(("sizes", "zero"), [({"tp": 2}, None), ({"tp": 2, "sp": True}, 1), ({}, 2), ({}, 3)])
def test_folded_adapters_are_an_ordinary_model(ranks, sizes, zero):
    for before, after, left in ranks(folded, sizes, zero, world=2):
        assert (before - after).abs().max() < 1e-9 and not left


def test_dropout_is_of_the_input_and_a_function_of_the_step(single):
    """peft's W x + s B A dropout(x): masks differ from step to step, a recomputed forward draws the same."""
    model = GPTModel(config(), spec(), VOCAB, S, parallel=single, seed=5)
    apply_lora(model, LoraConfig(rank=3, dropout=0.5))
    small.set_b({0: model}, single)
    tokens = batch(M)["tokens"]
    torch.manual_seed(1)
    first, second = model(tokens), model(tokens)
    torch.manual_seed(1)
    assert torch.equal(first, model(tokens)) and not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens), model(tokens)) and not torch.equal(model(tokens), first)
    linear = model.decoder.layers[0].mlp.linear_fc2
    x = torch.randn(5, 2, linear.weight.shape[1], dtype=torch.float64)
    adapter = linear.adapter
    expected = x @ linear.weight.T + LoraConfig(rank=3).scale * (x @ adapter.lora_A.T) @ adapter.lora_B.T
    assert torch.allclose(linear(x), expected, atol=1e-12)


def dropped(policy, schedule, sizes):
    """Whole gradients of a step with dropout."""
    ps = state(**sizes)
    shard, result = sharded_step(ps, schedule, policy, 1, LoraConfig(rank=3, dropout=0.3))
    return whole_gradients(shard), result.loss.item()


def test_dropout_is_the_same_when_layers_run_again_and_over_stages(ranks):
    want, loss = dropped("none", "none", {})
    again, same = dropped("layer", "none", {})
    assert same == loss and all(torch.equal(again[name], want[name]) for name in want)
    for found, over_stages in ranks(dropped, "stage", "zb-v", {"pp": 2}, world=2):
        assert over_stages == pytest.approx(loss, rel=1e-12) and found.keys() == want.keys()
        assert all(torch.allclose(found[name], want[name], atol=1e-12) for name in want)


def test_rslora_divides_by_the_root():
    assert LoraConfig(rank=16, alpha=8.0, rslora=True).scale == 2.0 and LoraConfig(rank=16, alpha=8.0).scale == 0.5


def fresh(ps):
    return GPTModel(config(num_layers=2), spec(), VOCAB, S, parallel=ps)


REFUSED = {
    "unknown": (LoraConfig(rank=2, modules=("gate_proj",)), ["'gate_proj'", "mlp.linear_fc1", "linear_qkv"]),
    "all": (LoraConfig(rank=2, modules=("all-linear",)), ["leave lora.modules out for all of them"]),
    "one of two": (LoraConfig(rank=2, modules=("linear_fc1", "fc1")), ["'fc1' is no linear"]),
    "large": (LoraConfig(rank=17), ["rank=17 is above the matrix of mlp.linear_fc1, [40, 16]", "at most 16"]),
    "none": (LoraConfig(), ["give a rank"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_has_changed(single, case):
    lora, words = REFUSED[case]
    model = fresh(single)
    with pytest.raises(ValueError) as refused:
        apply_lora(model, lora)
    assert all(word in str(refused.value) for word in words), refused.value
    assert model.lora is None and all(p.requires_grad for p in model.parameters())


def test_order_of_calls(single):
    model = fresh(single)
    with pytest.raises(ValueError, match="0 adapters"):
        merge_lora(model)
    apply_lora(model, LORA)
    with pytest.raises(ValueError, match="adapters of rank 3 already"):
        apply_lora(model, LORA)
    owned = fresh(single)
    DataParallel(owned, single)
    with pytest.raises(ValueError, match="before DataParallel"):
        apply_lora(owned, LORA)
    with pytest.raises(ValueError, match="a GPTModel is needed"):
        apply_lora(torch.nn.Linear(2, 2), LORA)
    with pytest.raises(ValueError, match=r"none of \d+ names"):
        lora_state_dict(owned.sharded_state_dict(), owned)


def test_a_part_of_a_path_names_some(single):
    model = fresh(single)
    apply_lora(model, LoraConfig(rank=2, modules=("self_attention.linear_proj",)))
    assert {n.split(".", 3)[3] for n, p in model.named_parameters() if p.requires_grad} == {
        "self_attention.linear_proj.adapter.lora_A",
        "self_attention.linear_proj.adapter.lora_B",
    }
