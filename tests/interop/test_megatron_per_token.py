"""Megatron's `calculate_per_token_loss`: every token counts the same, over microbatches, replicas and stages."""

from functools import partial

import pytest
import torch

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.pipeline_parallel.schedules import get_forward_backward_func
from core.interop.megatron.transformer.transformer_config import TransformerConfig

S, ROWS, VOCAB = 8, 8, 32
TOKENS = torch.randint(VOCAB, (ROWS, S + 1), generator=torch.Generator().manual_seed(1))
# other numbers of tokens in each row
MASK = (torch.arange(S) < torch.arange(1, ROWS + 1)[:, None]).double()


def loss_func(mask, losses, *, count):
    loss = (losses * mask).sum()
    return (loss, mask.sum().int(), {"sum": float(loss)}) if count else (loss / mask.sum(), {})


def build(config, **ends):
    torch.manual_seed(0)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=S, **ends)


def outputs(model, rows):
    tokens = TOKENS[rows]
    positions = torch.arange(S).expand(len(tokens), S)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])


def gradients(pp, *, per_token, count=True, hand_on=True):
    """(name -> gradient of this rank's stage after a step of 2 microbatches, reports)."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, pp)
    try:
        facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
        config = TransformerConfig(
            **facts, hidden_dropout=0.0, attention_dropout=0.0, calculate_per_token_loss=per_token
        )
        if hand_on:
            config.finalize_model_grads_func = finalize_model_grads
        ends = {"pre_process": mpu.is_pipeline_first_stage(), "post_process": mpu.is_pipeline_last_stage()}
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), build(config, **ends))
        dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        size = ROWS // dp // 2
        microbatches = [slice((2 * rank + i) * size, (2 * rank + i + 1) * size) for i in range(2)]

        def forward_step(iterator, model):
            rows = next(iterator)
            return outputs(model, rows), partial(loss_func, MASK[rows], count=count)

        reports = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(microbatches), model=model, num_microbatches=2,
            seq_length=S, micro_batch_size=size, forward_only=False,
        )  # fmt: skip
        if not hand_on:
            finalize_model_grads([model])
        return {name: p.grad for name, p in model.module.named_parameters()}, reports
    finally:
        mpu.destroy_model_parallel()


def expected(divide_by):
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 1)
    facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
    model = build(TransformerConfig(**facts, hidden_dropout=0.0, attention_dropout=0.0))
    ((outputs(model, slice(0, ROWS)) * MASK).sum() / divide_by).backward()
    mpu.destroy_model_parallel()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("pp, world", [(1, 1), (1, 2), (2, 2), (2, 4)])
def test_every_token_counts_the_same(ranks, pp, world):
    (whole,) = ranks(expected, MASK.sum(), world=1)
    for found, reports in ranks(partial(gradients, per_token=True), pp, world=world):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-11, atol=1e-13, msg=name)
        assert len(reports) in (0, 2)


def refused():
    with pytest.raises(
        ValueError, match=r"calculate_per_token_loss=True: loss_func returned 2 values; return \(sum of"
    ):
        gradients(1, per_token=True, count=False)


def untold():
    with pytest.warns(UserWarning, match="was given no num_tokens: gradients stay sums over the tokens"):
        found, _ = gradients(1, per_token=True, hand_on=False)
    return found


def test_what_is_missing_is_told(ranks):
    ranks(refused, world=1)
    (whole,) = ranks(expected, 1.0, world=1)
    for found in ranks(untold, world=2):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-11, atol=1e-13, msg=name)
