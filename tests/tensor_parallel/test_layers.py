"""Split equals whole: every parallel layer against its torch.nn twin, outputs and gradients, in float64."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.autograd import StageContext, WeightGradBag
from core.parallel_state import Layout, initialize_parameters
from core.tensor_parallel import (
    ColumnParallelLinear,
    Placement,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_region,
    dropout_in_tensor_region,
    gather_from_sequence_region,
    gather_from_tensor_region,
    padded_vocab_rows,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
    scatter_to_sequence_region,
    scatter_to_tensor_region,
    sum_gradient,
    vocab_parallel_cross_entropy,
)
from tests.parity.whole import assert_same, whole
from tests.states import state

S, B, H, FFN = 8, 3, 12, 16


def place_of(ps, sp):
    return Placement(ps.group("tp"), sp, torch.float64, stage=StageContext())


def fill(module, ps):
    initialize_parameters(module, seed=7, coordinate=ps.coordinate, sizes=ps.sizes)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("bias"):  # biases start at zero: make their place visible
                full = torch.randn(p.parallel_layout.shape, generator=torch.Generator().manual_seed(len(name)))
                p.copy_(full[p.parallel_layout.box(ps.coordinate, ps.sizes)])
    return module


def gradients(module, ps, prefix=""):
    found = {}
    for name, p in module.named_parameters():
        g = p.main_grad if hasattr(p, "main_grad") else p.grad
        found[prefix + name] = whole(name, g, p.parallel_layout, ps)
    return found


def mlp(sp, bias, deferred, main_grad):
    """Column then row around a GELU, against two nn.Linears."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ps = state(tp=world, sp=sp)
    place = place_of(ps, sp)
    up = fill(ColumnParallelLinear(H, (2, FFN), split_dim=1, place=place, bias=bias), ps)
    down = fill(RowParallelLinear(FFN, H, place=place, bias=bias), ps)
    names = {"up": up, "down": down}
    plain = {
        f"{n}.{k}": whole(k, p, p.parallel_layout, ps).requires_grad_()
        for n, m in names.items()
        for k, p in m.named_parameters()
    }
    if main_grad:
        for module in names.values():
            for p in module.parameters():
                p.main_grad = torch.zeros_like(p)
    torch.manual_seed(3)
    x = torch.randn(S, B, H, requires_grad=True)
    bias_up = plain["up.bias"].flatten() if bias else None
    hidden = F.linear(x, plain["up.weight"].flatten(0, 1), bias_up)
    want = F.linear(F.gelu(hidden[..., :FFN]) * hidden[..., FFN:], plain["down.weight"], plain.get("down.bias"))
    want.sin().sum().backward()

    rows = slice(rank * S // world, (rank + 1) * S // world) if sp else slice(None)
    mine = x.detach()[rows].clone().requires_grad_()
    bag = place.stage.bag = WeightGradBag() if deferred else None
    hidden = up(mine)
    gate, value = hidden.chunk(2, -1)
    got = down(F.gelu(gate) * value)
    place.stage.bag = None
    got.sin().sum().backward()
    if deferred:
        assert len(bag) == 2 and up.weight.grad is None
        bag.run()
    if main_grad:
        assert up.weight.grad is None, "a weight with a main_grad must not deliver twice"
        for module in names.values():
            if module.bias is not None:
                module.bias.main_grad.add_(module.bias.grad)
    torch.testing.assert_close(got, want[rows])
    torch.testing.assert_close(mine.grad, x.grad[rows])
    assert_same(
        {k: g for n, m in names.items() for k, g in gradients(m, ps, f"{n}.").items()},
        {k: p.grad for k, p in plain.items()},
        1e-12,
    )


@pytest.mark.parametrize("deferred, main_grad", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_column_then_row_equals_dense(ranks, world, sp, bias, deferred, main_grad):
    ranks(mlp, sp, bias, deferred, main_grad, world=world)


def gathered_output(sizes, split_dim):
    ps = state(tp=2)
    place = place_of(ps, False)
    layer = fill(ColumnParallelLinear(H, sizes, split_dim=split_dim, place=place, gather_output=True), ps)
    plain = {n: whole(n, p, p.parallel_layout, ps).requires_grad_() for n, p in layer.named_parameters()}
    x = torch.randn(S, B, H)
    want = F.linear(x, plain["weight"].flatten(0, -2), plain["bias"].flatten())
    want.sin().sum().backward()
    got = layer(x)
    got.sin().sum().backward()
    torch.testing.assert_close(got, want)
    assert_same(gradients(layer, ps), {n: p.grad for n, p in plain.items()}, 1e-12)


@pytest.mark.parametrize("sizes, split_dim", [(6, 0), ((2, 4), 1), ((2, 3, 5), 0), ((3, 4, 5), 1)])
def test_gather_output(ranks, sizes, split_dim):
    ranks(gathered_output, sizes, split_dim)


def copied():
    ps = state(tp=2)
    layer = fill(ColumnParallelLinear(H, 6, place=place_of(ps, False)), ps)
    other = copy.deepcopy(layer)
    assert other.weight is not layer.weight and torch.equal(other.weight, layer.weight)
    assert (
        other.weight.parallel_layout == layer.weight.parallel_layout and other.weight.initial == layer.weight.initial
    )
    x = torch.randn(S, B, H, requires_grad=True)
    other(x).sum().backward()
    assert layer.weight.grad is None and other.weight.grad is not None and x.grad is not None


def test_a_copied_layer_keeps_its_layout_and_its_peers(ranks):
    ranks(copied)


def embedding(sp, vocab, deferred):
    world, rank = dist.get_world_size(), dist.get_rank()
    ps = state(tp=world, sp=sp)
    place = place_of(ps, sp)
    table = fill(VocabParallelEmbedding(vocab, H, place=place), ps)
    assert table.weight.shape[0] * world == (vocab if vocab % world == 0 else padded_vocab_rows(vocab, world))
    plain = whole("weight", table.weight, table.weight.parallel_layout, ps).requires_grad_()
    assert plain.shape == (vocab, H)
    ids = torch.randint(vocab, (S, B))
    ids[0, :] = vocab - 1
    want = F.embedding(ids, plain)
    want.sin().sum().backward()
    rows = slice(rank * S // world, (rank + 1) * S // world) if sp else slice(None)
    if deferred:
        place.stage.bag = WeightGradBag()
        table.weight.main_grad = torch.zeros_like(table.weight)
    got = table(ids)
    got.sin().sum().backward()
    if deferred:
        place.stage.bag.run()
    torch.testing.assert_close(got, want[rows])
    assert_same(gradients(table, ps), {"weight": plain.grad}, 1e-12)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("vocab", [128, 101, 33])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_vocab_parallel_embedding(ranks, world, sp, vocab, deferred):
    if S % world and sp:
        with pytest.raises(AssertionError, match="does not divide over 3"):
            ranks(embedding, sp, vocab, deferred, world=world)
    else:
        ranks(embedding, sp, vocab, deferred, world=world)


@pytest.mark.parametrize(
    "vocab, tp, rows",
    [(50257, 1, 50304), (50257, 8, 50304), (50257, 3, 50304), (100, 4, 128), (8192, 2, 8192), (1, 6, 96)],
)
def test_padded_rows(vocab, tp, rows):
    assert padded_vocab_rows(vocab, tp) == rows
    assert rows % (tp * 16) == 0


CONJUGATES = {
    "copy, reduce": lambda x, w, g: reduce_from_tensor_region(copy_to_tensor_region(x, g) * w, g),
    "scatter, gather": lambda x, w, g: gather_from_tensor_region(scatter_to_tensor_region(x, g) * w.sum(), g),
    "sequence": lambda x, w, g: gather_from_sequence_region(
        scatter_to_sequence_region(x, g) * w.sum(), g, to_tensor_region=False
    ),
    "sequence, tensor region": lambda x, w, g: gather_from_sequence_region(
        reduce_scatter_to_sequence_region(gather_from_sequence_region(scatter_to_sequence_region(x, g), g) * w, g),
        g,
        to_tensor_region=False,
    ),
}
ONE_RANK = {"copy, reduce": sum, "sequence, tensor region": sum}


def conjugates(kind):
    """Each pair computes sum over ranks of w_r * x (or its plain form); gradients in x equal one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = state(tp=world).group("tp")
    torch.manual_seed(5)
    x, weights = torch.randn(4, 3, 8, requires_grad=True), torch.rand(world, 1)
    factor = weights.sum() if kind in ONE_RANK else weights[0].sum()
    want = x * factor
    want.sin().sum().backward()
    y = x.detach().clone().requires_grad_()
    got = CONJUGATES[kind](y, weights[rank] if kind in ONE_RANK else weights[0], group)
    got.sin().sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(y.grad, x.grad)


@pytest.mark.parametrize("kind", CONJUGATES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_conjugate_pairs(ranks, world, kind):
    ranks(conjugates, kind, world=world)


def uneven():
    ps = state(tp=2)
    with pytest.raises(ValueError, match=r"dim 0 of \(7, 12\) does not divide over tp=2"):
        ColumnParallelLinear(H, 7, place=place_of(ps, False))
    with pytest.raises(ValueError, match=r"dim 1 of \(12, 9\) does not divide over tp=2"):
        RowParallelLinear(9, H, place=place_of(ps, False))
    with pytest.raises(ValueError, match=r"sequence length 7 does not divide over 2 .* pad it to 8"):
        scatter_to_sequence_region(torch.zeros(7, 1, 4), ps.group("tp"))
    with pytest.raises(ValueError, match=r"last dim of \(2, 7\) does not divide over 2"):
        scatter_to_tensor_region(torch.zeros(2, 7), ps.group("tp"))


def test_uneven_splits_are_refused(ranks):
    ranks(uneven)


def test_a_models_layer_is_loudly_empty_until_it_is_filled():
    layer = ColumnParallelLinear(4, 6, place=Placement(filled_by_model=True))
    assert layer(torch.ones(1, 1, 4)).isnan().all()
    initialize_parameters(layer, seed=1, coordinate={}, sizes={})
    assert layer(torch.ones(1, 1, 4)).isfinite().all()
    assert layer.weight.parallel_layout == Layout((6, 4), {"tp": 0})


@pytest.mark.parametrize(
    "mapping",
    [
        copy_to_tensor_region,
        reduce_from_tensor_region,
        scatter_to_tensor_region,
        gather_from_tensor_region,
        scatter_to_sequence_region,
        gather_from_sequence_region,
        reduce_scatter_to_sequence_region,
        sum_gradient,
        lambda x, group: dropout_in_tensor_region(x, 0.1, group),
        lambda x, group: vocab_parallel_cross_entropy(x, torch.zeros(S, B, dtype=torch.long), group),
    ],
)
def test_a_group_of_torch_is_answered_with_ours(mapping):
    with pytest.raises(ValueError, match=r'group of ours.*not ProcessGroup: ps.group\("tp"\)'):
        mapping(torch.randn(S, B, H, requires_grad=True), dist.ProcessGroup(0, 1))
