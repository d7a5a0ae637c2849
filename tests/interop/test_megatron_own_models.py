"""Own models of Megatron's layers: norms of sequence shards by their mark, tables that are tied by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.interop.megatron import mpu
from core.interop.megatron import tensor_parallel as tp_
from core.interop.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.interop.megatron.distributed.finalize_model_grads import finalize_model_grads
from core.interop.megatron.transformer import MegatronModule
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from tests.parity.whole import assert_same, whole_gradients, whole_parameters

V, H, S, B, D = 100, 8, 16, 4, torch.float64


def init(weight):
    return nn.init.normal_(weight, 0, 0.5)


class Own(MegatronModule):
    """An MLP over a table, whose norm is applied to each rank's rows under sequence parallelism."""

    def __init__(self, config, is_marked, is_tied):
        super().__init__(config)
        self.splits = config.sequence_parallel
        torch.manual_seed(1)
        more = {"config": config, "init_method": init}
        self.table = tp_.VocabParallelEmbedding(num_embeddings=V, embedding_dim=H, **more)
        self.norm = nn.LayerNorm(H, dtype=D)
        if is_marked:
            for p in self.norm.parameters():
                p.sequence_parallel = config.sequence_parallel
        self.up = tp_.ColumnParallelLinear(H, 16, **more)
        self.down = tp_.RowParallelLinear(16, H, **more)
        self.head = tp_.ColumnParallelLinear(H, V, bias=False, skip_weight_param_allocation=is_tied, **more)

    def forward(self, tokens, labels):
        x = self.table(tokens).transpose(0, 1).contiguous()
        if self.splits:
            x = tp_.scatter_to_sequence_parallel_region(x)
        x = x + self.down(torch.tanh(self.up(self.norm(x))[0]))[0]
        logits, _ = self.head(x, weight=None if self.head.weight is not None else self.table.weight)
        return tp_.vocab_parallel_cross_entropy(logits, labels.T.contiguous()).transpose(0, 1)


def trained(tp, splits, is_marked=True, is_tied=False, wraps=True, compares=True):
    mpu.destroy_model_parallel()
    ps = mpu.initialize_model_parallel(tp)
    try:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=H,
            num_attention_heads=2,
            sequence_parallel=splits,
            tensor_model_parallel_size=tp,
            params_dtype=D,
            use_cpu_initialization=True,
        )
        own = Own(config, is_marked, is_tied)
        model = own
        if wraps:
            model = DistributedDataParallel(config=config, ddp_config=DistributedDataParallelConfig(), module=own)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(3)
        gradients = {}
        for _ in range(3):
            tokens = torch.randint(V, (B, S + 1), generator=generator)
            optimizer.zero_grad()
            model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).mean().backward()
            finalize_model_grads([model])
            gradients = whole_gradients(own, ps) if compares else {}
            optimizer.step()
        return gradients, whole_parameters(own, ps)
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize(("splits", "wraps"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_two_ranks_train_as_one(ranks, splits, wraps, is_tied):
    ((gradients, weights),) = ranks(trained, 1, False, is_tied=is_tied, world=1)
    for found, found_weights in ranks(trained, 2, splits, is_tied=is_tied, wraps=wraps, world=2):
        assert_same(found, gradients)
        assert_same(found_weights, weights)


def unmarked():
    told = r"norm\.weight should be the same on all tensor ranks.* p\.sequence_parallel"
    with pytest.raises(ValueError, match=told):
        trained(2, True, is_marked=False, compares=False)


def test_a_norm_of_rows_without_its_mark_is_told(ranks):
    ranks(unmarked, world=2)


class TiedByHand(nn.Module):
    """All columns of the logits, without a head."""

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(1)
        self.table = tp_.VocabParallelEmbedding(num_embeddings=V, embedding_dim=H, init_method=init, config=config)

    def forward(self, tokens):
        x = tp_.copy_to_tensor_model_parallel_region(torch.tanh(self.table(tokens)))
        return tp_.gather_from_tensor_model_parallel_region(F.linear(x, self.table.weight))


def tied_by_hand(tp):
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(tp)
    try:
        model = TiedByHand(TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype=D))
        tokens = torch.arange(24).view(3, 8)
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten() * 7 % V)
        return tuple(model.table.weight.shape), logits.shape[-1], loss.item()
    finally:
        mpu.destroy_model_parallel()


def test_a_table_that_is_tied_by_hand_has_no_rows_of_padding(ranks):
    """As Megatron's: F.cross_entropy of all columns would count them."""
    ((shape, columns, loss),) = ranks(tied_by_hand, 1, world=1)
    assert (shape, columns) == ((V, H), V)
    for found in ranks(tied_by_hand, 2, world=2):
        assert found[:2] == ((V // 2, H), V) and found[2] == pytest.approx(loss, rel=1e-12)


def headless():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2)
    try:
        config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype=D)
        more = {"init_method": init, "config": config}
        head = tp_.ColumnParallelLinear(H, V, bias=False, skip_weight_param_allocation=True, **more)
        assert list(head.parameters()) == [] and "weight of another" in repr(head)
        with pytest.raises(ValueError, match=r"no weight of its own .* forward\(x, weight=embedding.weight\)"):
            head(torch.ones(1, 1, H, dtype=D))
    finally:
        mpu.destroy_model_parallel()


def test_a_head_without_a_weight_wants_one(ranks):
    ranks(headless, world=2)


def smoothed(logits, labels):
    mpu.destroy_model_parallel()
    tp = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mpu.initialize_model_parallel(tp)
    try:
        part = tp_.scatter_to_tensor_model_parallel_region(logits)
        return tp_.vocab_parallel_cross_entropy(part, labels, label_smoothing=0.1)
    finally:
        mpu.destroy_model_parallel()


def test_labels_are_smoothed_over_the_other_classes(ranks):
    """1 - a for the label, a / (v - 1) for each other one: Megatron's, not torch's a / v for all."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3, 32, generator=generator, dtype=D)
    labels = torch.randint(32, (6, 3), generator=generator)
    losses = -logits.log_softmax(-1)
    of_label = losses.gather(-1, labels[..., None])[..., 0]
    want = 0.9 * of_label + 0.1 / 31 * (losses.sum(-1) - of_label)
    for world in (1, 2):
        for found in ranks(smoothed, logits, labels, world=world):
            torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
