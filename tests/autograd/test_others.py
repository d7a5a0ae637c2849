"""Under other people's tools: torch's checkpoint, saved-tensor hooks, gradient edges, threads."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.autograd import recompute
from tests.autograd.tiny import SEED, STEP, THUNKS, bags, batch, close, forward, reference, twins
from tests.marks import NOT_ON_2_11


def check(ours, expected):
    for name, p in ours.named_parameters():
        found = [g for g in (p.grad, getattr(p, "main_grad", None)) if g is not None and g.any()]
        if expected[name] is None:
            assert not found
        else:
            (gradient,) = found
            close(gradient, expected[name])


def run(ours, call, contexts=None):
    full = bags(2)
    losses = []
    for m in range(2):
        ids, features, target = batch(m)
        ours.stage.begin(seed=SEED, step=STEP, microbatch=m, bag=full[m])
        logits = call(ours, ids, features)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
        if not contexts:  # torch's checkpoint knows no stage: its second run must come at once
            losses[m].backward()
    if contexts:
        for m in (1, 0):
            losses[m].backward()
    assert [len(bag) for bag in full] == [THUNKS, THUNKS]
    for bag in full:
        bag.run()


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_torchs_checkpoint(main_grads, reentrant):
    """Its pack hooks hand backward a detached copy of whatever was saved: parameters must not be among it."""
    ours, plain = twins(main_grads)
    expected = reference(plain, range(2))

    def call(model, ids, features):
        features.requires_grad_(reentrant)  # the reentrant one needs an input that asks for a gradient
        return checkpoint(model, ids, features, use_reentrant=reentrant)

    run(ours, call)
    check(ours, expected)


@pytest.mark.parametrize("inner", [False, pytest.param(True, marks=NOT_ON_2_11)])
@pytest.mark.parametrize("main_grads", [False, True])
def test_under_saved_tensor_hooks(main_grads, inner):
    """Offloading: what was saved comes back as a copy, which remembers nothing."""
    ours, plain = twins(main_grads)
    expected = reference(plain, range(2))
    packed = []

    def call(model, ids, features):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.detach().clone(), torch.clone):
            return recompute(model, ids, features, stage=model.stage) if inner else model(ids, features)

    run(ours, call, contexts=True)
    check(ours, expected)
    assert len(packed) == 2 * 2 if inner else len(packed) > 2 * THUNKS
    parameters = {p.data_ptr() for p in ours.parameters() if getattr(p, "main_grad", None) is not None}
    if inner:
        assert not parameters & {t.data_ptr() for t in packed}


@NOT_ON_2_11
def test_a_region_inside_torchs_checkpoint():
    lin = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(lin(x.exp()).square().sum(), (x, *lin.parameters()))
    y = checkpoint(lambda x: recompute(lin, x.exp()).square(), x, use_reentrant=False)
    for ours, theirs in zip(torch.autograd.grad(y.sum(), (x, *lin.parameters())), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_gradient_edges():
    """As an executor keeps stage outputs: the tensor itself is gone before backward."""
    ours, plain = twins()
    expected = reference(plain, [0])
    full = bags(1)
    loss = forward(ours, 0, full[0])
    edge, one = torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss)
    del loss
    torch.autograd.backward((edge,), (one,))
    full[0].run()
    check(ours, expected)


def test_backward_in_another_thread():
    """CUDA's backward runs in the engine's threads: bag, stage and random numbers must not be thread-local."""
    ours, plain = twins()
    expected = reference(plain, range(2))
    full, losses = bags(2), []
    for m in range(2):
        ids, features, target = batch(m)
        ours.stage.begin(seed=SEED, step=STEP, microbatch=m, bag=full[m])
        logits = recompute(ours, ids, features, stage=ours.stage)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert [len(bag) for bag in full] == [THUNKS, THUNKS]
    for bag in full:
        bag.run()
    check(ours, expected)
