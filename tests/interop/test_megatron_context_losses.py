"""Losses of Megatron's `(loss, report)` over context ranks: means of a rank's own rows, and shares of the whole."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.pipeline_parallel.schedules import get_forward_backward_func
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.interop.megatron.utils import get_batch_on_this_cp_rank

S, ROWS, VOCAB = 16, 4, 32
TOKENS = torch.randint(VOCAB, (ROWS, S + 1), generator=torch.Generator().manual_seed(1))
# other numbers of tokens on each context rank
MASK = torch.rand(ROWS, S, generator=torch.Generator().manual_seed(2)).gt(0.4).double()


def of_all(n):
    group = mpu.get_context_parallel_group()
    if mpu.get_context_parallel_world_size() > 1:
        dist.all_reduce(n, group=group)
    return n


def share(mask, losses):
    """As Megatron multiplies it by the context ranks."""
    return (losses * mask).sum() / of_all(mask.sum()), {}


def multiplied(mask, losses):
    """As scripts had it before Megatron did."""
    loss, report = share(mask, losses)
    return loss * mpu.get_context_parallel_world_size(), report


def own_mean(mask, losses):
    """As in Megatron's QuickStart."""
    return losses.mean(), {}


def squared(mask, losses):
    return losses.square().mean(), {}


def counted_by_all(mask, losses):
    return (losses * mask).sum(), of_all(mask.sum()), {}


def counted_by_each(mask, losses):
    return losses.sum(), torch.tensor(losses.numel()), {}


LOSSES = {
    "share": share,
    "multiplied": multiplied,
    "own mean": own_mean,
    "squared": squared,
    "counted by all": counted_by_all,
    "counted by each": counted_by_each,
}


def gradients(name, cp, pp=1):
    """(name -> gradient after a step of 2 microbatches, what was told)."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, pp, context_parallel_size=cp)
    try:
        facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
        config = TransformerConfig(**facts, hidden_dropout=0.0, attention_dropout=0.0)
        config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(0)
        ends = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=S, **ends)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)

        def forward_step(iterator, model):
            rows = next(iterator)
            batch = get_batch_on_this_cp_rank(
                {
                    "tokens": TOKENS[rows, :-1],
                    "labels": TOKENS[rows, 1:],
                    "loss_mask": MASK[rows],
                    "position_ids": torch.arange(S).expand(2, S),
                }
            )
            losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            return losses, partial(LOSSES[name], batch["loss_mask"])

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter([slice(0, 2), slice(2, 4)]), model=model,
                num_microbatches=2, seq_length=S, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
        return {name: p.grad for name, p in model.module.named_parameters()}, [str(w.message) for w in told]
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", LOSSES)
def test_both_are_one_processs(ranks, name, pp):
    ((want, _),) = ranks(gradients, name, 1, world=1)
    lines = []
    for found, told in ranks(gradients, name, 2, pp, world=2 * pp):
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, want[parameter], rtol=1e-9, atol=1e-12)
        lines += told
    # of weighted rows nobody can tell which it is; last stages are told
    assert len(lines) == (2 if name == "squared" else 0)
    assert all("neither 1 nor 2: it is taken as a mean of this rank's own rows" in line for line in lines)
