"""Attributes that Megatron's scripts read of a wrapped model."""

import pytest
import torch

from core.autograd import has_main_grad
from core.data_parallel import DataParallel
from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.transformer.transformer_config import TransformerConfig

S, VOCAB = 8, 32
TOKENS = torch.randint(VOCAB, (4, S), generator=torch.Generator().manual_seed(1))


def build(tied=False, **ends):
    facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
    config = TransformerConfig(**facts, hidden_dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    more = ends | {"share_embeddings_and_output_weights": tied}
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=S, **more)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def backward(model):
    rows = TOKENS.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    model(rows, None, None, labels=rows.roll(-1, 1)).mean().backward()


def read_main_grads():
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(1, 1)
    try:
        model = build()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        alone = build().module
        own = torch.optim.SGD(alone.parameters(), lr=0.1)
        # the last two leave gradients in place, and zero the wrapper's
        for zero in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), model.zero_grad_buffer):
            backward(model)
            assert not any(hasattr(p, "main_grad") for p in parameters)
            finalize_model_grads([model])
            alone(TOKENS, labels=TOKENS.roll(-1, 1)).mean().backward()
            assert all(p.main_grad is p.grad for p in parameters)
            assert not any(map(has_main_grad, parameters))
            want = [p.grad for p in alone.parameters()]
            torch.testing.assert_close([p.main_grad.clone() for p in parameters], want, rtol=1e-11, atol=1e-14)
            for each in (optimizer, own):
                each.step()
            zero()
            own.zero_grad()
        # zero_grad_buffer leaves zeros, as in Megatron
        assert all(not p.main_grad.any() and p.grad is None for p in parameters)
        # no forward of the wrapper between: operations add to .grad
        model.module(TOKENS, labels=TOKENS.roll(-1, 1)).mean().backward()
        assert all(p.grad.any() and not p.main_grad.any() for p in parameters if p.grad is not None)
        DataParallel(model.module, ps)
        assert all(map(has_main_grad, parameters))
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("world", [1, 2])
def test_main_grad_is_another_name_of_the_gradient(ranks, world):
    ranks(read_main_grads, world=world)


def read_tables(tied):
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 1)
    try:
        table = (module := build(tied).module).embedding.word_embeddings.weight
        assert module.share_embeddings_and_output_weights is tied
        assert build(tied).share_embeddings_and_output_weights is tied
        assert module.shared_embedding_or_output_weight() is table
        last = build(tied, pre_process=False).module
        of_last = last.embedding.word_embeddings.weight if tied else last.output_layer.weight
        assert last.shared_embedding_or_output_weight() is of_last
        assert build(False, pre_process=False, post_process=False).shared_embedding_or_output_weight() is None
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("tied", [False, True])
def test_shared_tables(ranks, tied):
    ranks(read_tables, tied, world=1)
