"""Megatron's training loop with its optimizer and scheduler, against torch's AdamW in one process."""

import warnings
from functools import partial
from math import cos, pi

import pytest
import torch

from core.dist_checkpointing import load
from core.interop.megatron import dist_checkpointing
from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from core.interop.megatron.optimizer_param_scheduler import OptimizerParamScheduler
from core.interop.megatron.pipeline_parallel.schedules import get_forward_backward_func
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.parallel_state import layout_of

S, ROWS, VOCAB, STEPS = 8, 8, 32, 4
LR, DECAY, CLIP = 0.02, 0.1, 0.3
TOKENS = torch.randint(VOCAB, (STEPS, ROWS, S + 1), generator=torch.Generator().manual_seed(1))
# other numbers of tokens in each row
MASK = (torch.arange(S) < torch.arange(1, ROWS + 1)[:, None]).double()


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}


def a_config(experts=False, **more):
    more |= EXPERTS if experts else {}
    facts = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
    return TransformerConfig(**facts, hidden_dropout=0.0, attention_dropout=0.0, **more)


def build(config, **ends):
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    model = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=S, **ends)
    with torch.no_grad():
        # biases and norms that decay would show
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.5)
    return model


def outputs(model, tokens):
    positions = torch.arange(S).expand(len(tokens), S)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])


def rate_of(step):
    """Linear warm-up over 2 steps, then a cosine to 0 at step 10."""
    return LR * step / 2 if step <= 2 else LR * 0.5 * (1 + cos(pi * (step - 2) / 8))


def expected(per_token=False, experts=False):
    """(norms, zeros in gradients, weights by name) of torch's AdamW."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 1)
    try:
        model = build(a_config(experts))
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if p.dim() > 1 and not n.endswith("bias")], "weight_decay": DECAY},
            {"params": [p for n, p in named if p.dim() == 1 or n.endswith("bias")], "weight_decay": 0.0},
        ]
        assert all(group["params"] for group in groups)
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
        norms, zeros = [], []
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate_of(step + 1)
            losses = outputs(model, TOKENS[step])
            ((losses * MASK).sum() / MASK.sum() if per_token else losses.mean()).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            # without the rows that pad the vocabulary
            zeros.append(sum(int((p.grad[: layout_of(p).shape[0]] == 0).sum()) for _, p in named))
            optimizer.step()
            optimizer.zero_grad()
        assert min(norms) > CLIP
        return norms, zeros, {name: p.detach() for name, p in named}
    finally:
        mpu.destroy_model_parallel()


def loss_func(mask, losses, *, per_token):
    if per_token:
        return (losses * mask).sum(), mask.sum().int(), {}
    return losses.mean(), {}


def setup(chunks, divided, per_token, experts):
    """(wrapped chunks, optimizer, scheduler), as a training script makes them."""
    config = a_config(
        experts,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=divided)
    each = [{"vp_stage": i} for i in range(chunks)] if chunks > 1 else [{}]
    model = [DistributedDataParallel(config, ddp_config, build(config, **of)) for of in each]
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=LR, min_lr=0.0, weight_decay=DECAY, adam_beta1=0.9, adam_beta2=0.95,
        adam_eps=1e-8, clip_grad=CLIP, params_dtype=torch.float64, use_distributed_optimizer=divided,
        log_num_zeros_in_grad=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(optimizer_config, model)
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, LR, 0.0, 2 * ROWS, 10 * ROWS, "cosine", DECAY, DECAY, 0, "constant"
    )
    # a schedule begins with a rate of 0, of which no update would show anything
    scheduler.step(ROWS)
    return model, optimizer, scheduler


def states_of(model, optimizer):
    weights = {f"chunk{i}": chunk.module.sharded_state_dict(prefix="") for i, chunk in enumerate(model)}
    return {"optimizer": optimizer.sharded_state_dict(weights["chunk0"]), **weights}


def resumed(parts, directory, **of):
    """The same parts made anew, from a checkpoint."""
    model, optimizer, scheduler = parts
    dist_checkpointing.save(states_of(model, optimizer), str(directory))
    counts = scheduler.state_dict()
    model, optimizer, scheduler = setup(**of)
    found = dist_checkpointing.load(states_of(model, optimizer), str(directory))
    for i, chunk in enumerate(model):
        chunk.module.load_state_dict(found[f"chunk{i}"])
    optimizer.load_state_dict(found["optimizer"])
    scheduler.num_steps = 0
    scheduler.load_state_dict(counts)
    return model, optimizer, scheduler


def gradients(model, step, *, per_token, plain):
    """Of 2 microbatches, by the schedule or by a loop of the script's own."""
    dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    size = ROWS // dp // 2
    slices = [slice((2 * rank + i) * size, (2 * rank + i + 1) * size) for i in range(2)]
    data = [(rows, TOKENS[step][rows]) for rows in slices]
    if plain:
        for rows, tokens in data:
            loss, *_ = loss_func(MASK[rows], outputs(model[0], tokens), per_token=per_token)
            (loss if per_token else loss / 2).backward()
        finalize_model_grads(model, sum(MASK[rows].sum() for rows, _ in data) if per_token else None)
        return

    def forward_step(iterator, model):
        rows, tokens = next(iterator)
        return outputs(model, tokens), partial(loss_func, MASK[rows], per_token=per_token)

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(data) for _ in model], model=model,
        num_microbatches=2, seq_length=S, micro_batch_size=size, forward_only=False,
    )  # fmt: skip


def train(
    directory, tp, pp, *, ep=1, chunks=1, divided=False, per_token=False, plain=False, resume=False, experts=False,
    sequence=False,
):  # fmt: skip
    """(norms, zeros) after STEPS steps; the weights are in `directory`."""
    mpu.destroy_model_parallel()
    virtual = chunks if chunks > 1 else None
    mpu.initialize_model_parallel(tp, pp, virtual, expert_model_parallel_size=ep, sequence_parallel=sequence)
    try:
        of = {"chunks": chunks, "divided": divided, "per_token": per_token, "experts": experts}
        parts = setup(**of)
        facts = []
        for step in range(STEPS):
            if resume and step == 2:
                parts = resumed(parts, directory / "middle", **of)
            model, optimizer, scheduler = parts
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            gradients(model, step, per_token=per_token, plain=plain)
            done, norm, zeros = optimizer.step()
            assert done is True
            scheduler.step(increment=ROWS)
            facts.append((norm, zeros))
        state = {}
        for chunk in model:
            state |= chunk.module.sharded_state_dict(prefix="")
        dist_checkpointing.save(state, str(directory / "end"))
        return facts
    finally:
        mpu.destroy_model_parallel()


def whole(directory, experts):
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 1)
    try:
        model = build(a_config(experts))
        model.load_state_dict(load(model.sharded_state_dict(prefix=""), str(directory)))
        return {name: p.detach() for name, p in model.named_parameters()}
    finally:
        mpu.destroy_model_parallel()


CASES = {
    "one process": (1, 1, 1, {}),
    "dp 2": (1, 1, 2, {}),
    "dp 2, divided": (1, 1, 2, {"divided": True}),
    "dp 2, no schedule": (1, 1, 2, {"plain": True}),
    "dp 2, no schedule, per token": (1, 1, 2, {"plain": True, "per_token": True}),
    "tp 2": (2, 1, 2, {}),
    "tp 2, sequences split": (2, 1, 2, {"sequence": True}),
    "pp 2": (1, 2, 2, {}),
    "pp 2, per token": (1, 2, 2, {"per_token": True}),
    "pp 2, 2 chunks": (1, 2, 2, {"chunks": 2}),
    "tp 2, dp 2, divided, per token": (2, 1, 4, {"divided": True, "per_token": True}),
    "pp 2, dp 2, 2 chunks, divided": (1, 2, 4, {"divided": True, "chunks": 2}),
    "dp 2, divided, from a checkpoint": (1, 1, 2, {"divided": True, "resume": True}),
    "experts, dp 2": (1, 1, 2, {"experts": True}),
    "experts, ep 2, divided": (1, 1, 2, {"experts": True, "ep": 2, "divided": True}),
    "experts, ep 2, dp 4": (1, 1, 4, {"experts": True, "ep": 2}),
    "pp 2, from a checkpoint": (1, 2, 2, {"resume": True}),
}


@pytest.fixture(scope="module")
def alone(_pool):
    return {of: _pool(expected, *of, world=1)[0] for of in ((False, False), (True, False), (False, True))}


@pytest.mark.parametrize("case", CASES)
def test_a_loop_is_torchs_adamw_on_every_layout(ranks, alone, tmp_path, case):
    tp, pp, world, more = CASES[case]
    norms, zeros, weights = alone[more.get("per_token", False), more.get("experts", False)]
    found = ranks(partial(train, tmp_path, tp, pp, **more), world=world)
    assert all(facts == found[0] for facts in found)
    torch.testing.assert_close([norm for norm, _ in found[0]], norms, rtol=1e-9, atol=0)
    # a sum of products may be 0 in one order and not in another
    assert all(abs(count - want) <= 1 for (_, count), want in zip(found[0], zeros, strict=True))
    (mine,) = ranks(whole, tmp_path / "end", more.get("experts", False), world=1)
    for name, weight in weights.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-8, atol=1e-10, msg=name)


def wrap(ddp=None):
    return DistributedDataParallel(a_config(), DistributedDataParallelConfig(**(ddp or {})), build(a_config()))


@pytest.mark.parametrize(
    "of, words",
    [
        ({"optimizer": "adamw"}, r"optimizer='adamw' is not here; use adam \(its decay is AdamW's\) or sgd"),
        ({"optimizer": "muon"}, r"use build_optimizer\(shard, OptimizerConfig\(optimizer='muon'\)\)"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False is not here; leave it True"),
        ({"optimizer_cpu_offload": True}, r"optimizer_cpu_offload=True is not here; use offload=Offload\(...\)"),
        ({"use_precision_aware_optimizer": True}, "is not here; optimizer='adamw8bit' of core.optimizer"),
        ({"decoupled_lr": 1.0}, r"give get_megatron_optimizer\(config_overrides=\{ParamKey\(name='\*embedding\*'\)"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both True; leave 1 of 2"),
    ],
)
def test_a_field_that_is_not_here_is_refused(of, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(lr=1.0, **of)


def test_what_does_not_fit_is_refused_before_anything_is_changed(state):
    with pytest.raises(TypeError, match=r"OptimizerConfig has no weight_decy \(did you mean weight_decay\?\)"):
        OptimizerConfig(lr=1.0, weight_decy=0.9)
    model = wrap()
    for config, chunks, more, words in (
        (OptimizerConfig(lr=1.0), [model.module], {}, "1 of 1 chunks is a GPTModel; wrap it in DistributedDataPar"),
        (OptimizerConfig(), [model], {}, "lr=None; give the largest rate"),
        (OptimizerConfig(lr=1.0, adam_beta1=2.0), [model], {}, "adam_beta1=2.0 must be at least 0 and below 1"),
        (OptimizerConfig(lr=1.0, use_distributed_optimizer=True), [model], {}, "Config has False; say the same in b"),
        (OptimizerConfig(lr=1.0), [model], {"no_weight_decay_cond": None}, r"since Megatron-Core 0.16 config_overr"),
        (
            OptimizerConfig(lr=1.0), [model], {"config_overrides": {ParamKey(name="*"): {"lr": 1.0}}},
            "config_overrides has lr; known are the 6: max_lr, min_lr",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            get_megatron_optimizer(config, chunks, **more)
        assert model.shard is None and not any(hasattr(p, "take_main_grad") for p in model.parameters())
    get_megatron_optimizer(OptimizerConfig(lr=1.0), [model])
    with pytest.raises(ValueError, match=r"1 of 1 chunks has an optimizer already; use that, or chunk.shard.remove"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [model])
    divided = wrap({"use_distributed_optimizer": True})
    with pytest.raises(ValueError, match=r"and 0 optimizers of get_megatron_optimizer\(config, \[model\]\)"):
        divided.finish_grad_sync()


def test_groups_have_megatrons_facts(state):
    overrides = {
        ParamKey(name="*.bias"): {"wd_mult": 0.0},
        ParamKey(name="embedding.*"): {"max_lr": 0.5, "wd_mult": 0.5},
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0, min_lr=0.1, weight_decay=0.2), [wrap()], overrides)
    facts = [
        (g["wd_mult"], g["max_lr"], g["min_lr"], g["default_config"], g["weight_decay"])
        for g in optimizer.param_groups
    ]
    assert facts == [(1.0, 1.0, 0.1, True, 0.2), (0.5, 0.5, 0.1, False, 0.1), (0.0, 1.0, 0.1, True, 0.0)]
    assert len(optimizer.get_parameters()) == len(optimizer.state) > 0
    both = {ParamKey(name="*.bias"): {"wd_mult": 0.0}, ParamKey(name="*"): {"wd_mult": 1.0}}
    with pytest.raises(ValueError, match=r"give decoder.*bias 2 values of wd_mult: 0.0 and 1.0; let 1 key match it"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [wrap()], both)


def half(steps, **of):
    """A model of 16 bits with a bad gradient in the second step: [(step's answer, loss scale)]."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 1)
    try:
        config = a_config(finalize_model_grads_func=finalize_model_grads)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(4, 4).half())
        before = model.module.weight.clone()
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, **of), [model])
        found = []
        for step in range(steps):
            loss = model(torch.ones(1, 4, dtype=torch.float16)).float().square().sum()
            optimizer.zero_grad()
            optimizer.scale_loss(loss * (float("nan") if step == 1 else 1.0)).sum().backward()
            finalize_model_grads([model])
            found.append((*optimizer.step(), float(optimizer.get_loss_scale())))
        return found, not torch.equal(before, model.module.weight)
    finally:
        mpu.destroy_model_parallel()


def test_a_loss_scale_is_halved_at_an_overflow(ranks):
    more = {"fp16": True, "initial_loss_scale": 8.0, "hysteresis": 1, "loss_scale_window": 2}
    ((found, moved),) = ranks(partial(half, 4, **more), world=1)
    assert [each[0] for each in found] == [True, False, True, True] and moved
    assert [each[-1] for each in found] == [8.0, 4.0, 4.0, 8.0]
    assert found[1][1:3] == (None, None) and found[0][1] > 0 and found[0][2] is None
    ((kept, _),) = ranks(partial(half, 2, fp16=True, loss_scale=16.0), world=1)
    assert [each[-1] for each in kept] == [16.0, 16.0]
    assert kept[0][1] > 0


def norms_of_main_grads():
    """(what was said, the norm of a rank's part) of one split weight."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2, 1)
    try:
        config = a_config(tensor_model_parallel_size=2)
        facts = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(config=config, ddp_config=facts, module=build(config))
        how = OptimizerConfig(optimizer="adam", lr=LR, use_distributed_optimizer=True)
        get_megatron_optimizer(how, [model])
        outputs(model, TOKENS[0]).mean().backward()
        finalize_model_grads([model])
        weight = dict(model.named_parameters())["module.decoder.layers.0.mlp.linear_fc2.weight"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            part = weight.main_grad.float().norm()
            whole = weight.main_grad.norm()
        assert whole > part
        return [str(w.message) for w in caught if "main_grad.norm()" in str(w.message)]
    finally:
        mpu.destroy_model_parallel()


def test_a_norm_of_main_grad_is_the_whole_gradients_and_says_so(ranks):
    for said in ranks(norms_of_main_grads, world=2):
        assert len(said) == 1 and "a sum over tensor ranks counts it once for each" in said[0]
