"""A small GPT over pipeline stages and in one process: what the parity tests of pipelines compare."""

from functools import cache

import torch
import torch.distributed as dist

from core.models.gpt import GPTModel, gpt2_spec, gpt_stages, llama_spec
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from core.transformer import TransformerConfig
from tests.states import state
from tests.twins.grad_norm import squared_grad_norm
from tests.twins.per_parameter import PerParameterGradSync

VOCAB, S, LAYERS, SEED = 53, 8, 8, 7
LLAMA = {
    "normalization": "RMSNorm",
    "activation_func": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
}


def config(dropout=0.0, style="llama", **more):
    facts = {"num_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 20}
    facts |= {"init_method_std": 0.2, "params_dtype": torch.float64}
    facts |= {"hidden_dropout": dropout, "attention_dropout": dropout}
    return TransformerConfig(**facts | (LLAMA if style == "llama" else {}) | more)


def spec(style="llama"):
    return llama_spec() if style == "llama" else gpt2_spec()


def batch(rows, masked=False):
    """The global batch; `masked`: very uneven ignored labels, all of one row among them."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, rows, S), generator=generator)
    labels[0, ::3] = -100
    if masked:
        labels[rows // 2] = -100
        labels[rows // 2 - 1, 1:] = -100
    return {"tokens": tokens, "labels": labels}


def gradients_of(stages):
    return {n: p.main_grad.clone() for stage in stages for n, p in stage.named_parameters()}


def norm_of(stages, ps, tokens):
    """The norm of the gradient of the mean loss."""
    distinct = {p for stage in stages for p in stage.parameters()}
    return (squared_grad_norm(sorted(distinct, key=id), ps).sqrt() / tokens).item()


@cache
def reference(microbatches, tied, dropout, rows=1, masked=False, style="llama", num_layers=LAYERS):
    """(gradients by global name, loss, norm) of one process and one stage; `rows` per microbatch."""
    ps = ParallelState.single("cpu")
    made = {"share_embeddings_and_output_weights": tied, "parallel": ps}
    model = GPTModel(config(dropout, style, num_layers=num_layers), spec(style), VOCAB, S, **made)
    sync = PerParameterGradSync(model, ps)
    executor = SingleStage(model, ps=ps, num_microbatches=microbatches, grad_sync=sync, seed=SEED)
    result = executor.step(batch(microbatches * rows, masked), next_token_loss)
    return gradients_of([model]), result.loss.item(), norm_of([model], ps, result.num_tokens)


def build(placement, ps, tied=False, dropout=0.0, style="llama", num_layers=LAYERS, **more):
    """(stages of this rank, their gradients' owner)."""
    facts = {"share_embeddings_and_output_weights": tied, "parallel": ps, "placement": placement}
    model = config(dropout, style, num_layers=num_layers)
    stages = gpt_stages(model, spec(style), VOCAB, S, **facts | more)
    return stages, PerParameterGradSync(stages, ps)


@cache
def built(placement, tied, dropout):
    """Kept from one configuration to the next, so that `close` is tested with them."""
    ps = pipeline_state()
    return *build(placement, ps, tied, dropout), ps


def pipeline_state():
    return state(pp=dist.get_world_size() if dist.is_initialized() else 1)


def policy(name, stages):
    return [["none", "stage", "layer"][s % 3] for s in range(stages)] if name == "mixed" else name


def run(stages, sync, ps, mine, **facts):
    """(gradients, loss, norm) of one step over `mine`, this replica's rows."""
    pipeline = Pipeline(stages, ps=ps, grad_sync=sync, seed=SEED, **facts)
    result = pipeline.step(mine, next_token_loss)
    found = gradients_of(stages.values()), result.loss.item(), norm_of(stages.values(), ps, result.num_tokens)
    pipeline.close()
    sync.zero_grad()
    return found


def one_step(schedule, recompute, microbatches, tied, dropout):
    """As `run`, of a named schedule over all ranks of this job."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    placement = named.placement(schedule, world)
    stages, sync, ps = built(placement, tied, dropout)
    facts = {"schedule": schedule, "recompute": policy(recompute, len(placement))}
    return run(stages, sync, ps, batch(microbatches), num_microbatches=microbatches, **facts)


def differences(found, want, tolerance=1e-10):
    """What is not as it should be, in words; gradients of the parameters that this rank has."""
    told = []
    for name, got in found[0].items():
        scale, error = want[0][name].abs().max(), (got - want[0][name]).abs().max()
        if not (scale > 0 and error <= tolerance * scale):
            told.append(f"{name}: error {error:.2e} of {scale:.2e}")
    for what, got, expected in zip(("loss", "norm"), found[1:], want[1:], strict=True):
        if not abs(got - expected) <= tolerance * abs(expected):
            told.append(f"{what}: {got} and not {expected}")
    return told
