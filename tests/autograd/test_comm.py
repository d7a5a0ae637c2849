"""Each hook of a Comm is called where its docstring says: in F, in I, and again in W, on sharded tensors."""

import pytest
import torch
import torch.nn.functional as F

from core.autograd import Comm, NullGradSync, StageContext, WeightGradBag, deferred_embedding, deferred_linear
from core.autograd.protocols import GradSync
from tests.autograd.tiny import close, parameter

ROWS = 3


class Pending:
    def __init__(self, log, value):
        self.log, self.value = log, value

    def wait(self):
        self.log.append("wait")
        return self.value


def gather(x):
    return torch.cat([x, 2 * x])


def scatter(y):
    return y[:ROWS] + 3 * y[ROWS:]


def fake(log, note=lambda t: None):
    """Conjugate pairs: x -> [x; 2x] and dx -> dx' + 2 dx''; y -> y' + 3y'' and dy -> [dy; 3dy]."""

    def logged(name, fn):
        def call(t):
            log.append(name)
            note(t)
            return fn(t)

        return call

    return Comm(
        before_forward=logged("before_forward", gather),
        after_forward=logged("after_forward", scatter),
        before_backward=logged("before_backward", lambda gy: torch.cat([gy, 3 * gy])),
        after_backward=logged("after_backward", lambda dx: Pending(log, dx[:ROWS] + 2 * dx[ROWS:])),
    )


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_linear_with_every_hook(deferred, main_grad):
    log, stage, bag = [], StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag if deferred else None)
    x, w, b = torch.randn(ROWS, 4, requires_grad=True), parameter(2, 3, 4), parameter(2, 3)
    if main_grad:
        w.main_grad = torch.zeros(2, 3, 4)
    y = deferred_linear(x, w, b, stage=stage, comm=fake(log))
    assert log == ["before_forward", "after_forward"]
    theirs = scatter(F.linear(gather(x), w.flatten(0, 1))) + b.flatten()
    assert torch.equal(y, theirs)
    log.clear()
    gy = torch.randn(ROWS, 6)
    dx, dw = torch.autograd.grad(theirs, (x, w), gy)
    y.backward(gy)
    held = ["before_backward", "after_backward", "wait"]
    assert log == (held if deferred else [*held[:2], "before_forward", "wait"])  # dW runs beside the wire
    if deferred:
        (thunk,) = bag._thunks
        assert [t.shape[0] for t in thunk.tensors()] == [ROWS, ROWS]  # as they are between the ranks
        log.clear()
        bag.run()
        assert log == ["before_forward", "before_backward"]
    close(x.grad, dx)
    close(w.main_grad if main_grad else w.grad, dw)
    # the bias is added after the collective: its gradient is that of the whole dy, on every rank
    close(b.grad, (4 * gy.sum(0)).view(2, 3))


def test_no_wire_for_a_gradient_that_nobody_needs():
    log, w = [], parameter(2, 4)
    deferred_linear(torch.randn(ROWS, 4), w, stage=StageContext(), comm=fake(log)).sum().backward()
    assert log == ["before_forward", "after_forward", "before_backward", "before_forward"]
    log.clear()
    x = torch.randn(ROWS, 4, requires_grad=True)
    deferred_linear(x, w.requires_grad_(False), stage=StageContext(), comm=fake(log)).sum().backward()
    assert log == ["before_forward", "after_forward", "before_backward", "after_backward", "wait"]


@pytest.mark.parametrize("deferred", [False, True])
def test_the_input_is_gathered_beside_dx_when_dw_does_not_wait(deferred):
    log, stage, bag = [], StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag if deferred else None)
    plain = fake(log)

    def start(x):
        log.append("start_again")
        return Pending(log, gather(x))

    hooks = {"before_forward": plain.before_forward, "after_backward": plain.after_backward}
    comm = Comm(**hooks, restart_before_forward=start)
    x, w = torch.randn(ROWS, 4, requires_grad=True), parameter(3, 4)
    y = deferred_linear(x, w, stage=stage, comm=comm)
    log.clear()
    gy = torch.randn_like(y)
    y.backward(gy)
    if deferred:
        assert log == ["after_backward", "wait"]
        bag.run()
    else:
        assert log == ["start_again", "after_backward", "wait", "wait"]
    close(w.grad, gy.t() @ gather(x.detach()))


def test_hooks_see_no_graph():
    """A collective must never be recorded: grad mode is off in F, in I and in W."""
    seen = []
    comm = fake([], lambda t: seen.append(torch.is_grad_enabled()))
    stage, bag = StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    x = torch.randn(ROWS, 4, requires_grad=True)
    for run in (bag.run, bag.run_one):
        deferred_linear(x, parameter(2, 4), stage=stage, comm=comm).sum().backward()
        run()
    assert seen == [False] * 12


@pytest.mark.parametrize("deferred", [False, True])
def test_embedding_hooks(deferred):
    log, stage, bag = [], StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag if deferred else None)
    table, ids = parameter(5, 4), torch.tensor([0, 3, 3, 1, 4, 0])
    y = deferred_embedding(ids, table, stage=stage, comm=fake(log))
    assert log == ["after_forward"]
    theirs = scatter(F.embedding(ids, table))
    assert torch.equal(y, theirs)
    gy = torch.randn(ROWS, 4)
    (dw,) = torch.autograd.grad(theirs, table, gy)
    log.clear()
    y.backward(gy)
    assert log == ([] if deferred else ["before_backward"])
    if deferred:
        assert bag._thunks[0].tensors()[1].shape[0] == ROWS
        bag.run()
    assert log == ["before_backward"]
    close(table.grad, dw)


def test_column_parallel_bias_is_added_inside():
    """Without after_forward the bias belongs to this rank's columns, and its gradient to this rank's dy."""
    log = []
    comm = Comm(before_forward=fake(log).before_forward, after_backward=fake(log).after_backward)
    x, w, b = torch.randn(ROWS, 4, requires_grad=True), parameter(2, 4), parameter(2)
    y = deferred_linear(x, w, b, stage=StageContext(), comm=comm)
    theirs = F.linear(gather(x), w, b)
    assert torch.equal(y, theirs)
    gy = torch.randn(2 * ROWS, 2)
    expected = torch.autograd.grad(theirs, (x, w, b), gy)
    for mine, his in zip(torch.autograd.grad(y, (x, w, b), gy), expected, strict=True):
        close(mine, his)


def test_the_null_synchroniser_speaks_the_whole_protocol():
    words = [name for name in vars(GradSync) if not name.startswith("_")]
    assert len(words) == 11
    for word in words:
        method = getattr(NullGradSync(), word)
        assert method(*([None] * (word != "finish"))) is None
