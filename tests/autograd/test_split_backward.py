"""F F F, I I I, W W W in any order gives the gradients of the plain twin."""

import weakref

import pytest
import torch

from core.autograd import StageContext, WeightGradBag, deferred_linear
from core.autograd.gradients import accumulate
from tests.autograd.tiny import THUNKS, bags, batch, close, forward, parameter, reference, twins

DEFERRED = {"table", "features", "wide", "narrow", "square", "bare"}


def check(ours, expected, main_grads):
    for name, p in ours.named_parameters():
        if expected[name] is None:
            assert p.grad is None
            assert not getattr(p, "main_grad", torch.zeros(1)).any()
        elif main_grads and name in DEFERRED:
            close(p.main_grad, expected[name])
            assert p.grad is None
        else:
            close(p.grad, expected[name])
            assert not getattr(p, "main_grad", torch.zeros(1)).any()


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("inputs, weights", [((0, 1, 2), (0, 1, 2)), ((2, 0, 1), (1, 2, 0)), ((1, 2, 0), (2, 1, 0))])
def test_fff_iii_www(main_grads, inputs, weights):
    ours, plain = twins(main_grads)
    expected = reference(plain, range(3))
    homes = {name: p.main_grad.data_ptr() for name, p in ours.named_parameters() if hasattr(p, "main_grad")}
    held = {name: p.main_grad for name, p in ours.named_parameters() if hasattr(p, "main_grad")}
    full = bags(3)
    losses = [forward(ours, m, full[m]) for m in range(3)]
    for count, m in enumerate(inputs, 1):
        losses[m].backward()
        assert [len(bag) for bag in full] == [THUNKS if i in inputs[:count] else 0 for i in range(3)]
    for m in weights:
        full[m].run()
        assert len(full[m]) == 0
    check(ours, expected, main_grads)
    for name, p in ours.named_parameters():
        if name in homes:
            assert p.main_grad is held[name]
            assert p.main_grad.data_ptr() == homes[name]


@pytest.mark.parametrize("main_grads", [False, True])
def test_one_weight_gradient_at_a_time_among_forwards(main_grads):
    """1F1B with W taken apart: thunks of microbatch 0 run between F and I of the others."""
    ours, plain = twins(main_grads)
    expected = reference(plain, range(3))
    full = bags(3)
    first = forward(ours, 0, full[0])
    first.backward()
    second = forward(ours, 1, full[1])
    full[0].run_one()
    third = forward(ours, 2, full[2])
    second.backward()
    full[0].run_one()
    full[1].run_one()
    third.backward()
    assert [len(bag) for bag in full] == [THUNKS - 2, THUNKS - 1, THUNKS]
    for bag in full:
        bag.run()
    check(ours, expected, main_grads)


@pytest.mark.parametrize("main_grads", [False, True])
def test_without_a_bag_the_gradient_comes_at_once(main_grads):
    ours, plain = twins(main_grads)
    expected = reference(plain, range(2))
    for m in range(2):
        forward(ours, m).backward()
    check(ours, expected, main_grads)


def test_the_bag_is_that_of_the_forward():
    """The stage has moved on, or was released, when backward comes; the gradient must not follow it."""
    ours, _ = twins()
    mine, other = bags(2)
    loss = forward(ours, 0, mine)
    ours.stage.begin(seed=1, step=1, microbatch=9, bag=other)
    loss.backward()
    assert (len(mine), len(other)) == (THUNKS, 0)
    plain_use = forward(ours, 1, None)
    ours.stage.bag = other
    plain_use.backward()
    assert (len(mine), len(other)) == (THUNKS, 0)


def test_newest_first_and_one_thunk_per_use():
    ours, _ = twins()
    bag = WeightGradBag()
    forward(ours, 0, bag).backward()
    names = {p: name for name, p in ours.named_parameters()}
    order = [names[p] for p in bag.parameters()]
    backward = ["table", "square", "square", "narrow", "wide"]
    assert [name for name in order if name in backward and name != "table"] == backward[1:]
    assert sorted(order) == sorted([*DEFERRED, "table", "square"])
    assert order[0] == "table"  # the head
    assert [names[bag.run_one()] for _ in range(THUNKS)] == order[::-1]


def test_tensors_are_released_one_by_one():
    weights = [parameter(4, 4) for _ in range(4)]
    stage, bag = StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    x = torch.randn(5, 4, requires_grad=True)
    y = x * 1.0
    for weight in weights:
        y = deferred_linear(y, weight, stage=stage).tanh()
    y.sum().backward()
    alive = [[weakref.ref(t) for t in thunk.tensors()] for thunk in bag._thunks]
    living = lambda: [all(ref() is not None for ref in refs) for refs in alive]  # noqa: E731
    for left in range(4, 0, -1):
        assert living() == [True] * left + [False] * (4 - left)
        bag.run_one()
    assert not any(ref() is not None for refs in alive for ref in refs)


class Recorder:
    """A thunk that says when it ran, under which mode, and who was still alive."""

    def __init__(self, parameter, log):
        self.parameter, self.log = parameter, log

    def run(self):
        self.log.append((self.parameter, torch.is_grad_enabled()))

    def tensors(self):
        return ()


@pytest.mark.parametrize("at_once", [False, True])
def test_any_thunk_runs_newest_first_and_without_grad_mode(at_once):
    bag, log = WeightGradBag(), []
    for name in "abc":
        bag.put(Recorder(name, log))
    alive = [weakref.ref(thunk) for thunk in bag._thunks]
    assert bag.parameters() == ["a", "b", "c"]
    if at_once:
        bag.run()
    else:
        assert [bag.run_one() for _ in range(3)] == ["c", "b", "a"]
    assert log == [("c", False), ("b", False), ("a", False)]
    assert not any(ref() for ref in alive)
    bag.run()  # empty
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", [None, torch.float32])
def test_accumulate(kind):
    """For operations whose gradient comes finished: into main_grad in place, or into .grad in the right dtype."""
    w = parameter(2, 3)
    if kind is not None:
        w.main_grad = torch.ones(2, 3, dtype=kind)
    home = getattr(w, "main_grad", None)
    gradient = torch.randn(6, dtype=torch.float32)
    for count in (1, 2):
        accumulate(w, gradient)
        if kind is None:
            close(w.grad, (count * gradient).view(2, 3).double())
        else:
            assert w.main_grad is home
            close(home, (1 + count * gradient).view(2, 3), 1e-6)
            assert w.grad is None


def test_an_operation_keeps_its_input_only_through_autograd():
    """A pack hook (offloading) must be able to move it away: nothing but what autograd saves may hold it."""
    stage, bag = StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    x, w = torch.randn(5, 4, requires_grad=True), parameter(3, 4)
    h = x.tanh()
    alive = weakref.ref(h)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = deferred_linear(h.sin(), w, stage=stage) + deferred_linear(h, w, stage=stage)
    del h
    assert alive() is None
    y.sum().backward()
    bag.run()
    close(w.grad, (x.tanh() + x.tanh().sin()).detach().sum(0).expand(3, 4))


def test_held_inputs_do_not_keep_the_graph():
    """Between I and W only the inputs and output gradients of linears live, not the stage's own input."""
    stage, bag = StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    x = torch.randn(5, 4, requires_grad=True)
    deferred_linear(x.tanh(), parameter(3, 4), stage=stage).sum().backward()
    refs = weakref.ref(x), weakref.ref(x.grad)
    del x
    assert len(bag) == 1
    assert [ref() for ref in refs] == [None, None]


def test_a_held_output_gradient_is_never_written():
    """Residual branches share one gradient tensor; fan-in must not add into the one that a thunk holds."""
    stage, bag = StageContext(), WeightGradBag()
    stage.begin(seed=0, step=0, microbatch=0, bag=bag)
    weights = [parameter(4, 4) for _ in range(3)]
    x = torch.randn(5, 4, requires_grad=True)
    y = x
    for weight in weights:
        y = y + deferred_linear(y, weight, stage=stage)
    given = torch.randn(5, 4)
    torch.autograd.backward((torch.autograd.graph.get_gradient_edge(y),), (given,))
    held = [thunk.tensors()[1] for thunk in bag._thunks]
    expected = [given]
    for weight in weights[:0:-1]:
        expected.append(expected[-1] + expected[-1] @ weight)
    for ours, theirs in zip(held, expected, strict=True):
        close(ours, theirs.detach())


def test_a_failing_thunk_leaves_the_others():
    ours, _ = twins()
    bag = WeightGradBag()
    forward(ours, 0, bag).backward()
    ours.table.main_grad = torch.zeros(1)  # of the wrong shape: embedding and head
    with pytest.raises(RuntimeError):
        bag.run()
    assert len(bag) == THUNKS - 1


def test_snapshot_release_and_begin():
    stage, bag = StageContext(), WeightGradBag()
    assert (stage.bag, stage.driven) == (None, False)
    stage.begin(seed=1, step=2, microbatch=3, bag=bag)
    assert stage.driven
    before = stage.snapshot()
    stage.begin(seed=4, step=5, microbatch=6)
    stage.driven = False
    assert (stage.bag, stage.seed, stage.step, stage.microbatch) == (None, 4, 5, 6)
    stage.restore(before)
    assert (stage.bag, stage.seed, stage.step, stage.microbatch, stage.driven) == (bag, 1, 2, 3, True)
    stage.release()
    assert (stage.bag, stage.driven) == (None, False)


def test_the_twins_drop_something_and_differ_between_microbatches():
    """Else parity under dropout would say nothing."""
    _, plain = twins()
    ids, features, _ = batch(0)
    outputs = []
    for m in (0, 1, 0):
        plain.stage.begin(seed=0, step=0, microbatch=m)
        outputs.append(plain(ids, features))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
