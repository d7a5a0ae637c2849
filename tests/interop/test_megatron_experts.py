"""A script in Megatron's words over a model with experts: the same weights on every layout, Megatron's means."""

import pytest
import torch

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.pipeline_parallel.schedules import get_forward_backward_func
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.parallel_state import layout_of
from tests.parity.whole import assembled, assert_same, whole_gradients

VOCAB, S, ROWS, MICROBATCHES = 53, 8, 4, 2  # ROWS: of a microbatch, on all data ranks


def config(**more):
    facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
    facts |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False, "init_method_std": 0.3}
    facts |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_aux_loss_coeff": 0.3}
    facts |= {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.1, "moe_grouped_gemm": True}
    return TransformerConfig(**facts | more)


def batches(step):
    """Rows of this data rank, a microbatch at a time."""
    generator = torch.Generator().manual_seed(step)
    dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for _ in range(MICROBATCHES):
        yield torch.randint(VOCAB, (ROWS, S), generator=generator)[rank * ROWS // dp :][: ROWS // dp]


def forward_step(iterator, model):
    tokens = next(iterator)
    losses = model(tokens, None, None, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean()})


def build(spec=None, **more):
    ends = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
    spec = spec if spec is not None else get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=True)
    return GPTModel(config(**more), spec, VOCAB, S, position_embedding_type="rope", **ends)


def gradients_of_a_step(model, step):
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(step),
        model=model,
        num_microbatches=MICROBATCHES,
    )
    finalize_model_grads([model])
    return reports


def train(tp=1, pp=1, ep=1):
    """Whole weights after three steps of SGD."""
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    try:
        model = DistributedDataParallel(config(), DistributedDataParallelConfig(), build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            optimizer.zero_grad()
            gradients_of_a_step(model, step)
            optimizer.step()
        weights = {name: weight.detach() for name, weight in model.module.named_parameters()}
        return assembled(weights, {name: layout_of(p) for name, p in model.module.named_parameters()}, ps)
    finally:
        mpu.destroy_model_parallel()


LAYOUTS = [(2, {"ep": 2}), (2, {"tp": 2, "ep": 2}), (2, {"tp": 2}), (2, {"pp": 2})]
LAYOUTS += [(4, {"tp": 2, "ep": 4}), (4, {"tp": 2}), (4, {"ep": 2}), (4, {"pp": 2, "ep": 2})]
IN_FULL = [(2, {"tp": 2, "ep": 2}), (2, {"pp": 2}), (4, {"tp": 2, "ep": 4}), (4, {"ep": 2}), (4, {"pp": 2, "ep": 2})]


@pytest.mark.parametrize(
    "world, layout",
    [pytest.param(*case, marks=pytest.mark.full) if case in IN_FULL else case for case in LAYOUTS],
)
def test_wrapped_experts_are_trained_alike_on_every_layout(ranks, world, layout):
    (want,) = ranks(train, world=1)
    for found in ranks(train, **layout, world=world):
        assert_same(found, want)


def mean_of_the_papers():
    """A microbatch's loss, alpha aux and zeta z are all means: what a plain loop over the mean loss gives."""
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel()
    model = DistributedDataParallel(config(), DistributedDataParallelConfig(), build())
    gradients_of_a_step(model, 0)
    plain = build()
    plain.load_state_dict(model.module.state_dict())
    for tokens in batches(0):
        (plain(tokens, labels=tokens.roll(-1, 1)).mean() / MICROBATCHES).backward()
    found, want = whole_gradients(model.module, ps), whole_gradients(plain, ps)
    mpu.destroy_model_parallel()
    assert_same(found, want)


def scaled(pp, kind):
    """Gradients under `grad_scale_func`, over the factor of that; and reports."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, pp)
    found = []
    try:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for func, factor in ((None, 1.0), (scaler.scale if kind == "scaler" else lambda loss: loss * 0.3, 0.3)):
            factor = 1024.0 if func == scaler.scale else factor
            asked = {"grad_scale_func": func} if kind == "argument" else {}
            torch.manual_seed(0)
            model = DistributedDataParallel(config(**asked), DistributedDataParallelConfig(), build(**asked))
            if kind != "argument":
                model.config.grad_scale_func = model.module.config.grad_scale_func = func
            reports = gradients_of_a_step(model, 0)
            assert len(reports) == (MICROBATCHES if mpu.is_pipeline_last_stage() else 0)
            gradients = [p.grad.as_subclass(torch.Tensor) / factor for p in model.module.parameters()]
            found.append((gradients, [float(report["lm loss"]) for report in reports]))
    finally:
        mpu.destroy_model_parallel()
    (want, reports), (gradients, same) = found
    torch.testing.assert_close(gradients, want, rtol=1e-12, atol=1e-15)
    assert want and reports == same


@pytest.mark.parametrize("pp, world, kind", [(1, 1, "argument"), (1, 2, "scaler"), (2, 2, "attribute")])
def test_grad_scale_func_scales_all_losses(ranks, pp, world, kind):
    ranks(scaled, pp, kind, world=world)


def test_auxiliary_losses_are_means_as_the_loss_is(ranks):
    ranks(mean_of_the_papers, world=1)


def test_fields_of_the_layout_of_experts_that_say_what_is_so_anyway():
    config(expert_tensor_parallel_size=1, moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall")
    with pytest.raises(
        ValueError, match=r"expert_tensor_parallel_size=2 \(here: 1\), moe_router_dtype=fp64 \(here: fp32\)"
    ):
        config(expert_tensor_parallel_size=2, moe_router_dtype="fp64")
    with pytest.raises(ValueError, match=r"moe_expert_capacity_factor=1.0: experts have no capacity"):
        config(moe_expert_capacity_factor=1.0)


def contradictions():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(expert_model_parallel_size=2)
    try:
        with pytest.raises(ValueError, match=r"num_experts=8\), and TransformerConfig says num_moe_experts=4; give"):
            build(get_gpt_layer_local_spec(num_experts=8))
        with pytest.raises(ValueError, match=r"num_experts=None\), and TransformerConfig says num_moe_experts=4"):
            build(get_gpt_layer_local_spec())
        tokens = torch.zeros(1, S, dtype=torch.int64)
        with pytest.raises(ValueError, match="nobody sums their gradients"):
            build()(tokens, labels=tokens)
    finally:
        mpu.destroy_model_parallel()


def test_a_spec_that_contradicts_the_configuration_is_refused(ranks):
    ranks(contradictions)
