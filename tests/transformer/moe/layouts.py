"""A small GPT with experts over any layout of ranks and in one process: what the tests of experts compare."""

from functools import cache

import torch

from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages, moe_spec
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.context import context_batch
from core.parallel_state.layout import true_part
from core.parallel_state.modules import named_buffers
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from core.transformer import TransformerConfig
from tests.parity.shards import norm, whole_gradients
from tests.parity.whole import assembled, assert_same, whole_parameters
from tests.states import state
from tests.twins.grad_norm import squared_grad_norm
from tests.twins.per_parameter import PerParameterGradSync

VOCAB, S, SEED, MICROBATCHES, ROWS = 53, 8, 7, 2, 4  # ROWS: of the global batch
ROUTERS = {
    "softmax": {},
    "pre_softmax": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    "groups": {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 2, "moe_router_group_topk": 1},
}
BALANCING = {
    "none": {"moe_router_load_balancing_type": "none"},
    "microbatch": {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.1},
    "sequence": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "seq_aux_loss"},
    "global": {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"},
    "bias": {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.02},
}

COUNTED = ("expert_bias", "rows_of_last_step")  # buffers that steps write


def config(router="softmax", balancing="none", shared=False, layers=2, dropout=0.0, tied=False, **more):
    """tied: of the model, not of its configuration; see `of_model`."""
    facts = {"num_layers": layers, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
    facts |= {"ffn_hidden_size": 20, "num_moe_experts": 4, "moe_ffn_hidden_size": 12}
    facts |= {"normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True}
    facts |= {"add_bias_linear": False, "init_method_std": 0.3, "params_dtype": torch.float64}
    facts |= {"hidden_dropout": dropout, "attention_dropout": dropout}
    if shared:
        facts["moe_shared_expert_intermediate_size"] = 8
    return TransformerConfig(**facts | ROUTERS[router] | BALANCING[balancing] | more)


def of_model(facts):
    """The arguments of a model."""
    return {"share_embeddings_and_output_weights": facts.get("tied", False)}


def batch():
    """The global batch, ROWS sequences, unevenly masked labels."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, ROWS, S), generator=generator)
    labels[0, ::3] = -100
    labels[2, 1:] = -100
    return {"tokens": tokens, "labels": labels}


@cache
def reference(**facts):
    """(gradients, loss, norm, initial weights) of one process, a sequence per microbatch; nothing deferred."""
    ps = ParallelState.single("cpu")
    model = GPTModel(config(**facts), moe_spec(), VOCAB, S, parallel=ps, **of_model(facts))
    true = {name: tuple(map(slice, p.parallel_layout.shape)) for name, p in model.named_parameters()}
    initial = {name: p.detach()[true[name]].clone() for name, p in model.named_parameters()}
    sync = PerParameterGradSync(model, ps)
    executor = SingleStage(model, ps=ps, num_microbatches=ROWS, grad_sync=sync, seed=SEED)
    result = executor.step(batch(), next_token_loss)
    gradients = {name: p.main_grad[true[name]].clone() for name, p in model.named_parameters()}
    total = (squared_grad_norm(list(model.parameters()), ps).sqrt() / result.num_tokens).item()
    return gradients, result.loss.item(), total, initial


def made(facts, ps, placement):
    return gpt_stages(config(**facts), moe_spec(), VOCAB, S, parallel=ps, placement=placement, **of_model(facts))


def on_layout(facts, zero, schedule, recompute, **sizes):
    """(stages, shard, executor, this rank's rows) on the layout of this rank."""
    ps = state(**sizes)
    placement = (0,) if schedule == "none" else named.placement(schedule, ps.size("pp"))
    stages = made(facts, ps, placement)
    shard = DataParallel(stages, ps, zero_stage=zero, bucket_size=300, overlap=True)
    rows = ROWS // ps.size("dp")
    if schedule != "none":
        options = {"schedule": schedule, "recompute": recompute, "num_microbatches": rows}
        executor = Pipeline(stages, ps=ps, grad_sync=shard, seed=SEED, **options)
    else:
        (model,) = stages.values()
        apply_recompute(model, recompute, stage=model.stage)
        executor = SingleStage(model, ps=ps, num_microbatches=rows, grad_sync=shard, seed=SEED)
    mine = {key: value[ps.index("dp") * rows :][:rows] for key, value in batch().items()}
    return stages, shard, executor, context_batch(mine, ps)


def step(facts, zero=0, schedule="none", recompute="none", **sizes):
    """(whole gradients, loss, norm) of one step on this rank's rows; initial weights are the reference's."""
    stages, shard, executor, mine = on_layout(facts, zero, schedule, recompute, **sizes)
    if shard.ps.size("pp") == 1 and schedule == "none" and zero < 3:
        (model,) = stages.values()
        for name, value in whole_parameters(model, shard.ps).items():
            assert torch.equal(value, reference(**facts)[3][name]), name
    shard.zero_grad()
    result = executor.step(mine, next_token_loss)
    return whole_gradients(shard), result.loss.item(), norm(shard, result.num_tokens)


def trained(facts, zero=0, schedule="none", recompute="none", steps=3, **sizes):
    """Whole weights and buffers by name after some steps on this rank's rows."""
    stages, shard, executor, mine = on_layout(facts, zero, schedule, recompute, **sizes)
    optimizer = ShardedSGD(shard, OptimizerConfig(lr=0.5, clip_grad=0.5, weight_decay=0.0))
    for _ in range(steps):
        optimizer.zero_grad()
        result = executor.step(mine, next_token_loss)
        optimizer.step(num_tokens=result.num_tokens)
    for stage in stages.values():
        shard.unshard(stage)
    tensors = dict(shard.named_parameters()) | dict(named_buffers(stages))
    layouts = {name: layout_of(tensor) for name, tensor in tensors.items()}
    return assembled(tensors, layouts, shard.ps)


@cache
def trained_alone(**facts):
    """The same in one process, a sequence per microbatch."""
    ps = ParallelState.single("cpu")
    model = GPTModel(config(**facts), moe_spec(), VOCAB, S, parallel=ps, **of_model(facts))
    shard = DataParallel(model, ps)
    optimizer = ShardedSGD(shard, OptimizerConfig(lr=0.5, clip_grad=0.5, weight_decay=0.0))
    executor = SingleStage(model, ps=ps, num_microbatches=ROWS, grad_sync=shard, seed=SEED)
    for _ in range(3):
        optimizer.zero_grad()
        result = executor.step(batch(), next_token_loss)
        optimizer.step(num_tokens=result.num_tokens)
    tensors = dict(model.named_parameters()) | dict(named_buffers(model))
    return {name: true_part(tensor.detach(), layout_of(tensor), {}, {}) for name, tensor in tensors.items()}


def compare_after_steps(cases):
    """Three steps of each case on this rank: biases and counts are those of one process, and so are weights."""
    for facts, layout in cases:
        found, want = trained(facts, **layout), trained_alone(**facts)
        assert found.keys() == want.keys()
        for name in want:
            if name.endswith(COUNTED):
                assert torch.equal(found[name], want[name]), (name, facts, layout, found[name], want[name])
        assert_same(*({n: t for n, t in side.items() if not n.endswith(COUNTED)} for side in (found, want)))
