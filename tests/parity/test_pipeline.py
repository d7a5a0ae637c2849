"""Every named schedule, recompute policy, rank and microbatch count gives one process's loss, gradients and norm."""

import itertools
from functools import cache

import pytest
import torch

from core.data_parallel import PerParameterGradSync
from core.models.gpt import GPTModel, gpt_stages, llama_spec
from core.optimizer import AdamW, OptimizerConfig
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.pipeline import schedules as named
from core.training import next_token_loss
from core.transformer import TransformerConfig
from tests.parity.whole import assert_same
from tests.states import state

VOCAB, S, LAYERS = 53, 8, 8
SCHEDULES = list(named.NAMED)
POLICIES = ["none", "selective", "layer", "stage", "mixed"]
RANKS, MICROBATCHES = [1, 2, 4], [1, 2, 3, 8]


def config(dropout):
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=20,
        init_method_std=0.2,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        params_dtype=torch.float64,
    )


def batch(rows):
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, rows, S), generator=generator)
    labels[0, ::3] = -100
    return {"tokens": tokens, "labels": labels}


@cache
def reference(microbatches, tied, dropout, rows_per_microbatch=1):
    """(gradients by global name, loss, norm) of one process and one stage."""
    ps = ParallelState.single("cpu")
    model = GPTModel(config(dropout), llama_spec(), VOCAB, S, share_embeddings_and_output_weights=tied, parallel=ps)
    sync = PerParameterGradSync(model, ps)
    optimizer = AdamW(model, ps, OptimizerConfig(lr=1e-3), grad_sync=sync)
    executor = SingleStage(model, ps=ps, num_microbatches=microbatches, grad_sync=sync, seed=7)
    result = executor.step(batch(microbatches * rows_per_microbatch), next_token_loss)
    gradients = {n: p.main_grad.clone() for n, p in model.named_parameters()}
    return gradients, result.loss.item(), optimizer.step(num_tokens=result.num_tokens).grad_norm.item()


def policy(name, stages):
    return [["none", "stage", "layer"][s % 3] for s in range(stages)] if name == "mixed" else name


def one_step(schedule, recompute, microbatches, tied, dropout, ps, **more):
    placement = named.placement(schedule, ps.size("pp"))
    stages = gpt_stages(
        config(dropout),
        llama_spec(),
        VOCAB,
        S,
        placement=placement,
        share_embeddings_and_output_weights=tied,
        parallel=ps,
    )
    sync = PerParameterGradSync(stages, ps)
    optimizer = AdamW(stages, ps, OptimizerConfig(lr=1e-3), grad_sync=sync)
    pipeline = Pipeline(
        stages,
        ps=ps,
        schedule=schedule,
        num_microbatches=microbatches,
        recompute=policy(recompute, len(placement)),
        grad_sync=sync,
        seed=7,
        **more,
    )
    result = pipeline.step(batch(microbatches), next_token_loss)
    gradients = {n: p.main_grad.clone() for stage in stages.values() for n, p in stage.named_parameters()}
    norm = optimizer.step(num_tokens=result.num_tokens).grad_norm.item()
    pipeline.close()
    return gradients, result.loss.item(), norm


def compare(schedule, recompute, microbatches, tied, dropout, **more):
    ps = state(pp=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    gradients, loss, norm = reference(microbatches, tied, dropout)
    found, got_loss, got_norm = one_step(schedule, recompute, microbatches, tied, dropout, ps, **more)
    assert abs(got_loss - loss) <= 1e-10 * abs(loss)
    assert_same(found, {n: gradients[n] for n in found})
    assert abs(got_norm - norm) <= 1e-10 * norm
    return sorted(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", POLICIES)
def test_every_schedule_equals_one_process(ranks, schedule, recompute):
    for world, m, tied, dropout in itertools.product(RANKS, MICROBATCHES, (False, True), (0.0, 0.1)):
        names = ranks(compare, schedule, recompute, m, tied, dropout, world=world)
        assert set().union(*names) == set(reference(m, tied, dropout)[0]), "every parameter lives somewhere"
