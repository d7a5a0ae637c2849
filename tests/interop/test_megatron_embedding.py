"""Megatron's table of a model of one's own: whole rows, or the sequence split where the argument asks for it."""

import pytest
import torch

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron import tensor_parallel as tp_
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from tests.parity.whole import assert_same, whole_gradients

B, S, H, VOCAB = 2, 16, 8, 50
FACTS = {"num_layers": 1, "hidden_size": H, "num_attention_heads": 2, "params_dtype": torch.float64}


class Own(torch.nn.Module):
    """As Megatron's LanguageModelEmbedding and a pair of linears; its loss asks for no labels of the ids' shape."""

    def __init__(self, config, more):
        super().__init__()
        self.config, self.more = config, more
        facts = {"config": config, "init_method": lambda weight: torch.nn.init.normal_(weight, 0, 0.5)}
        torch.manual_seed(1)
        self.table = tp_.VocabParallelEmbedding(VOCAB, H, **facts, **more)
        self.up, self.down = tp_.ColumnParallelLinear(H, 16, **facts), tp_.RowParallelLinear(16, H, **facts)

    def forward(self, ids, splits):
        x = self.table(ids)
        shape = list(x.shape)
        if not self.more.get("reduce_scatter_embeddings"):
            x = x.transpose(0, 1).contiguous()
            if splits:
                x = tp_.scatter_to_sequence_parallel_region(x)
        y = self.down(torch.tanh(self.up(x)[0]))[0]
        if splits:
            y = tp_.gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False)
        return shape, y


def own_model(tp, splits, more):
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(tp)
    try:
        model = Own(TransformerConfig(**FACTS, sequence_parallel=splits), more)
        ids = torch.randint(VOCAB, (B, S), generator=torch.Generator().manual_seed(3))
        shape, y = model(ids, splits)
        # of each place in the sequence another weight: rows in another order are another loss
        (y.square().mean((1, 2)) * torch.arange(1, S + 1)).sum().backward()
        return shape, y.detach(), whole_gradients(model, ps)
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize(
    "more, splits, shape",
    [
        ({}, False, [B, S, H]),
        ({}, True, [B, S, H]),
        ({"reduce_scatter_embeddings": False}, True, [B, S, H]),
        ({"reduce_scatter_embeddings": True}, True, [S // 2, B, H]),
    ],
)
def test_the_argument_alone_splits_the_sequence(ranks, more, splits, shape):
    ((_, want, gradients),) = ranks(own_model, 1, False, {}, world=1)
    for got_shape, y, of_rank in ranks(own_model, 2, splits, more, world=2):
        assert got_shape == shape
        torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-13)
        assert_same(of_rank, gradients)


def test_one_rank_transposes_too(ranks):
    ((shape, y, gradients),) = ranks(own_model, 1, True, {"reduce_scatter_embeddings": True}, world=1)
    ((_, want, want_gradients),) = ranks(own_model, 1, False, {}, world=1)
    assert shape == [S, B, H]
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-14)
    assert_same(gradients, want_gradients)


def test_ids_of_one_row_have_no_sequence_to_split(ranks):
    assert ranks(refused, world=1)


def refused():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel()
    try:
        facts = {"config": TransformerConfig(**FACTS), "init_method": torch.nn.init.normal_}
        table = tp_.VocabParallelEmbedding(VOCAB, H, reduce_scatter_embeddings=True, **facts)
        with pytest.raises(ValueError, match=r"takes ids \[b, s\], 2 dims; these have 1: \[4\]; give"):
            table(torch.arange(4))
        return True
    finally:
        mpu.destroy_model_parallel()
