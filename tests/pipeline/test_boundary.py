"""The boundary between two stages: each tensor says whether it wants a gradient, and nothing is lost there."""

import copy
import time
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.parallel_state.layout import Layout, set_layout
from core.pipeline import Pipeline, PipelineError
from core.pipeline.run.messages.boundary import check_leaf, flatten, tree_map
from tests.pipeline import tiny
from tests.pool import Pool

W = tiny.WIDTH


class Ids(nn.Module):
    """Integers only: nothing wants a gradient."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * 100).long().abs() % 32


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 4)

    def forward(self, ids):
        time.sleep(0.02)
        return self.table(ids)


def integers(schedule):
    """Messages that nobody answers by gradients arrive all the same (a dropped handle loses them on gloo)."""
    pipe = tiny.pipeline(schedule, 12, lambda s: Ids() if s == 0 else Slow())
    total = pipe.step(tiny.rows(24), tiny.squares).loss_sum
    assert total > 0 and all(p.grad is None for p in pipe.modules.get(0, nn.Module()).parameters())


def test_a_boundary_without_gradients_loses_no_message(ranks):
    ranks(integers, "1f1b", world=2, timeout=30)


@dataclass
class Output:
    hidden: Tensor
    mask: Tensor
    name: str = "it"


class First(nn.Module):
    """A mask that floats, in a dataclass."""

    def __init__(self):
        super().__init__()
        self.inner = tiny.part(0)

    def forward(self, x):
        mask = torch.zeros(len(x), len(x), dtype=x.dtype).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -1e9)
        return Output(self.inner(x), mask)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny.part(1)

    def forward(self, given):
        assert type(given) is Output and given.name == "it"
        assert not given.mask.requires_grad
        assert given.hidden.requires_grad == torch.is_grad_enabled() or not self.training
        y = self.inner(given.hidden)
        return F.scaled_dot_product_attention(y, y, y, given.mask)


def made(s):
    return First() if s == 0 else Second()


def masks(recompute):
    pipe = tiny.pipeline("1f1b", 4, made, recompute=recompute)
    for _ in range(2):
        pipe.step(tiny.rows(8), tiny.squares)
    _, want = tiny.alone(2, tiny.rows(8), make=made)
    tiny.assert_equal({n: g / 2 for n, g in tiny.gradients(pipe).items()}, want)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_a_mask_wants_no_gradient_and_a_dataclass_is_a_nesting(ranks, recompute):
    ranks(masks, recompute, world=2)


class Counts(nn.Module):
    """Notes whether its output has a graph."""

    def __init__(self, s):
        super().__init__()
        self.inner, self.graphs = tiny.part(s).requires_grad_(s == 3), []

    def forward(self, x):
        y = self.inner(x)
        self.graphs.append(y.requires_grad)
        return y


def frozen(recompute):
    pipe = tiny.pipeline("1f1b", 4, Counts, recompute=recompute)
    pipe.step(tiny.rows(8), tiny.squares)
    for s, module in pipe.modules.items():
        assert any(module.graphs) == (s == 3), f"stage {s}: {module.graphs}"
    _, want = tiny.alone(4, tiny.rows(8), make=Counts)
    tiny.assert_equal(tiny.gradients(pipe), want)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_frozen_stages_keep_no_graph_and_are_sent_no_gradient(ranks, recompute):
    ranks(frozen, recompute, world=4)


class Changes(nn.Module):
    """Asks for gradients in some microbatches only."""

    def __init__(self, s, first):
        super().__init__()
        self.inner, self.first, self.calls = tiny.part(s), first, []

    def forward(self, x):
        self.calls.append(1)
        y = self.inner(x)
        return y if (len(self.calls) == 1) == self.first else y.detach()


def sometimes(first):
    pipe = tiny.pipeline("1f1b", 4, lambda s: Changes(s, first) if s == 0 else tiny.part(s))
    pipe.step(tiny.rows(8), tiny.squares)


def refused(first):
    with pytest.raises(PipelineError, match="wanted none before in this step"):
        sometimes(first)


def test_gradients_in_some_microbatches_only(ranks):
    ranks(sometimes, True, world=2)
    pool = Pool(2)  # a failure closes its connections
    try:
        pool(refused, False, world=2)
    finally:
        pool.close()


def test_what_a_stage_may_return():
    @dataclass(frozen=True, slots=True)
    class Nested:
        x: Tensor
        rest: dict

    x = torch.ones(2)
    value = {"a": Nested(x, {"b": (x * 2, 3)}), "c": [None, "text", torch.float32]}
    leaves, _ = flatten(value)
    assert next(leaf for leaf in leaves if isinstance(leaf, Tensor)) is x
    again = tree_map(lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf, value)
    assert type(again["a"]) is Nested and again["a"].rest["b"][0].tolist() == [3, 3] and again["c"] == value["c"]
    for leaf in leaves:
        check_leaf(0, leaf)
    check_leaf(0, torch.nn.functional.relu)
    with pytest.raises(ValueError, match=r"stage 3 returns a .*Linear that holds a tensor"):
        check_leaf(3, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="neither a tensor nor a plain constant"):
        check_leaf(3, lambda: x)
    with pytest.raises(ValueError, match="returns a sparse_coo tensor"):
        check_leaf(0, x.to_sparse())
    with pytest.raises(ValueError, match="returns a nested tensor"):
        check_leaf(0, torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged))


class Ends(nn.Module):
    """A table, or a head that was meant to be the same one."""

    def __init__(self, s, mark):
        super().__init__()
        self.part = nn.Embedding(8, W) if s == 0 else nn.Linear(W, 8, bias=False)
        with torch.no_grad():
            self.part.weight.copy_(torch.randn(8, W, generator=torch.Generator().manual_seed(1)))
        if mark:
            set_layout(self.part.weight, Layout((8, W), partial={"embedding"}))

    def forward(self, x):
        return self.part(x)


def ends(mark):
    pipe = tiny.pipeline("1f1b", 4, lambda s: Ends(s, mark))
    ids = torch.randint(0, 8, (8,), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        pipe.step(ids, tiny.squares)
    (weight,) = pipe.modules[min(pipe.modules)].parameters()
    table = pipe.modules[min(pipe.modules)].part.weight.detach().clone().requires_grad_()
    F.linear(F.embedding(ids, table), table).square().sum().backward()
    tiny.assert_equal({"w": weight.grad}, {"w": 2 * table.grad})


def copies():
    with pytest.warns(UserWarning, match="one tied table"):
        tiny.pipeline("1f1b", 4, lambda s: Ends(s, False))


def one_block():
    """As ALBERT: every rank makes the whole list, one block stands in it twice."""
    torch.manual_seed(0)
    block = nn.Linear(W, W)
    with pytest.warns(UserWarning, match="a block that stands in two stages.*seed by stage"):
        tiny.pipeline("1f1b", 4, lambda s: nn.Sequential(nn.Linear(W, W), block))


def same_constants():
    """Identities and zeros, which nobody has drawn, are nobody's one block."""
    tiny.pipeline("1f1b", 4, lambda s: nn.utils.parametrizations.orthogonal(nn.Linear(W, W)))


def test_one_block_in_two_stages_is_told(ranks):
    ranks(one_block, world=2)
    ranks(same_constants, world=2)


def test_two_copies_of_a_tied_table_are_told_and_marked_ones_are_right(ranks):
    ranks(copies, world=2)
    ranks(ends, True, world=2)


class Both(nn.Module):
    """Four stages in a V over two ranks: both ends on the first one, with one table."""

    def __init__(self, s, table):
        super().__init__()
        self.s, self.table = s, table
        self.inner = tiny.part(s) if table is None else None

    def forward(self, x):
        if self.table is None:
            return self.inner(x)
        return F.embedding(x, self.table) if self.s == 0 else F.linear(x, self.table)


def both_ends():
    table = nn.Parameter(torch.randn(8, W, generator=torch.Generator().manual_seed(1)))
    set_layout(table, Layout((8, W), partial={"embedding"}))
    pipe = tiny.pipeline("zb-v", 4, lambda s: Both(s, table if s in (0, 3) else None))
    ids = torch.randint(0, 8, (8,), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        pipe.step(ids, tiny.squares)
    plain = [Both(s, table.detach().clone().requires_grad_() if s == 0 else None) for s in range(4)]
    head = plain[0].table
    y = F.linear(plain[2](plain[1](plain[0](ids))), head)
    y.square().sum().backward()
    if 0 in pipe.modules:
        tiny.assert_equal({"w": table.grad}, {"w": 2 * head.grad})


def test_both_ends_on_one_rank_keep_their_gradient(ranks):
    ranks(both_ends, world=2)


def test_two_tables_on_one_rank_are_refused(single):
    pipe = Pipeline([Ends(0, True), Ends(1, True)], ps=single, schedule="zb-v", num_microbatches=2)
    with pytest.raises(ValueError, match="2 parameters for their tied table"):
        pipe.step(torch.zeros(4, dtype=torch.long), tiny.squares)


def squares_of(schedule, recompute):
    """How often loss_fn ran for each microbatch."""
    calls = []
    pipe = tiny.pipeline(schedule, 4, recompute=recompute)
    result = pipe.step(tiny.rows(8), lambda y, part: calls.append(1) or tiny.squares(y, part))
    return len(calls), float(result.loss_sum)


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_runs_once_per_microbatch(ranks, world):
    want = ranks(squares_of, "gpipe", "none", world=world)
    for schedule in ("gpipe", "zb-v"):
        found = ranks(squares_of, schedule, "stage", world=world)
        assert sum(calls for calls, _ in found) == 4
        if schedule == "gpipe":
            assert [loss for _, loss in found] == pytest.approx([loss for _, loss in want])


class Auxiliary(nn.Module):
    """Leaves a loss on itself."""

    def __init__(self):
        super().__init__()
        self.inner = tiny.part(0)

    def forward(self, x):
        y = self.inner(x)
        self.aux = y.square().mean()
        return y


@pytest.mark.parametrize(("recompute", "says"), [("none", "backward through the graph"), ("stage", "`aux` of a Aux")])
def test_a_loss_of_one_stage_that_another_reads_is_never_silent(single, recompute, says):
    first = Auxiliary()
    pipe = Pipeline([first, tiny.part(1)], ps=single, schedule="zb-v", num_microbatches=4, recompute=recompute)
    with pytest.raises(RuntimeError, match=says):
        pipe.step(tiny.rows(8), lambda y, _: (y.square().sum() + first.aux, len(y)))
    pipe.step(tiny.rows(8), tiny.squares)
    assert first.aux.isfinite()
    _, want = tiny.alone(2, tiny.rows(8))
    first.zero_grad(), pipe.modules[1].zero_grad()
    pipe.step(tiny.rows(8), tiny.squares)
    tiny.assert_equal({n.replace("inner.", ""): g for n, g in tiny.gradients(pipe).items()}, want)


class Island(nn.Module):
    """A float32 island inside autocast."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        with torch.autocast("cpu", enabled=False):
            return self.b(y.float())


@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", "none"), ("zb-v", "stage"), ("1f1b", [[Island]])])
def test_autocast_around_a_step_covers_forward_only(single, schedule, recompute):
    count = 2 if schedule == "zb-v" else 1
    torch.manual_seed(0)
    ours = [nn.Sequential(Island()).float() for _ in range(count)]
    plain = copy.deepcopy(ours)
    pipe = Pipeline(ours, ps=single, schedule=schedule, num_microbatches=4, recompute=recompute)
    x = tiny.rows(8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(x, lambda y, _: (y.float().square().sum(), len(y)))
    for part in x.chunk(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.Sequential(*plain)(part).float().square().sum()
        loss.backward()
    for mine, theirs in zip(nn.ModuleList(ours).parameters(), nn.ModuleList(plain).parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-6 * theirs.grad.abs().max()
