"""Megatron's way to cut a batch over context ranks, its bool masks of packed documents included."""

import pytest
import torch

from core.context_parallel import visible_mask
from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.interop.megatron.utils import get_batch_on_this_cp_rank
from core.parallel_state import ContextRows
from tests.context_parallel.rows import documents

S, VOCAB = 16, 61


def batch(begin):
    """As Megatron's loaders give it."""
    tokens, labels = torch.randint(VOCAB, (2, 2, S), generator=torch.Generator().manual_seed(1))
    positions = (torch.arange(S) - begin).expand(2, S)
    mask = visible_mask(begin)
    return {
        "tokens": tokens, "labels": labels, "loss_mask": torch.ones(2, S), "attention_mask": mask,
        "position_ids": positions,
    }  # fmt: skip


def loss_per_token(begin, cp):
    """[b, s] from all ranks, in the order of the sequence."""
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(context_parallel_size=cp)
    try:
        facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
        config = TransformerConfig(**facts, hidden_dropout=0.0, attention_dropout=0.0)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=S)
        whole = batch(begin)
        mine = get_batch_on_this_cp_rank(whole)
        assert list(mine) == list(whole)
        # unpacked by position, as scripts do it
        tokens, labels, loss_mask, attention_mask, position_ids = mine.values()
        loss = model(tokens, position_ids, attention_mask, labels=labels) * loss_mask
        return ContextRows.of_state(ps).rows(S), loss.detach(), attention_mask
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("cuts", [[[], []], [[3, 4], [9]]])
def test_cut_batches_have_the_losses_of_whole_ones(ranks, cuts):
    begin = documents(S, cuts)
    ((_, want, mask),) = ranks(loss_per_token, begin, 1, world=1)
    assert mask.dtype == torch.bool
    for rows, found, mask in ranks(loss_per_token, begin, 2, world=2):
        torch.testing.assert_close(found, want[:, rows], rtol=1e-12, atol=1e-12)
        assert (mask is None) == (not any(cuts))
        assert mask is None or torch.equal(mask, begin[:, rows])


def refused():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(context_parallel_size=2)
    try:
        bidirectional = batch(documents(S, [[], []])) | {"attention_mask": torch.zeros(1, 1, S, S, dtype=torch.bool)}
        with pytest.raises(ValueError, match="not causal within packed documents"):
            get_batch_on_this_cp_rank(bidirectional)
        odd = {name: value[:, : S - 1] for name, value in batch(documents(S, [[], []])).items()}
        with pytest.raises(ValueError, match="use 12 or 16"):
            get_batch_on_this_cp_rank(odd | {"attention_mask": None})
    finally:
        mpu.destroy_model_parallel()


def test_other_masks_and_lengths_are_refused(ranks):
    ranks(refused, world=2)
