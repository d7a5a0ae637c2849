"""What one step costs in calls, which no noise can blur: Python functions, and collectives."""

import gc
import sys

import pytest
import torch
from torch.nn.modules import module
from torch.optim import optimizer

from benchmarks.llama import Shape
from benchmarks.tensor_parallel import our_model, python_calls
from core.parallel_state.optimizer_steps import _call, _registry

SHAPE = Shape(hidden=64, layers=4, heads=8, kv_heads=4, ffn=96, seq=32, vocab=128)


def without_hooks_of_others(count, *args, **how):
    """`count(...)` without the hooks on every optimizer's step, and every module, of models that other tests keep,
    and without callbacks of references to what they left."""
    registries = (
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
    )
    others = [dict(hooks) for hooks in registries]
    for hooks in registries:
        hooks.clear()
    # the entry of our own around optimizers' steps stays, without who listens
    ours = _registry()
    listeners = ((ours.before, [*ours.before]), (ours.after, [*ours.after]))
    for hooks, before in zip(registries[:2], others[:2], strict=True):
        hooks.update({key: hook for key, hook in before.items() if getattr(hook, "func", None) is _call})
    for now, _ in listeners:
        now.clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what they have compiled
    gc.collect()
    gc.disable()
    try:
        return count(*args, **how)
    finally:
        gc.enable()
        for hooks, before in zip(registries, others, strict=True):
            hooks.update(before)
        for now, before in listeners:
            now.extend(before)


def calls_of_one_model(sequence):
    return without_hooks_of_others(python_calls, SHAPE, sequence=sequence)


@pytest.mark.parametrize("sequence, most", [(False, 1500), (True, 2500)])
def test_python_calls_of_a_step(ranks, sequence, most):
    for calls in ranks(calls_of_one_model, sequence):
        assert 300 < calls <= most, "below 300 the count itself is broken"


def collectives(sequence):
    """(forward calls, bytes), (backward calls, bytes) over the tensor ranks of one step, no gradient owner."""
    model = our_model(SHAPE, torch.float32, sequence=sequence)
    tokens = torch.randint(SHAPE.vocab, (2, SHAPE.seq), generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # which compare what the ranks hold
        model(tokens, labels=tokens.roll(-1, 1))
    traffic = model.parallel.traffic()["tp"]
    before = traffic.calls, traffic.bytes
    loss = model(tokens, labels=tokens.roll(-1, 1)).mean()
    now = traffic.calls, traffic.bytes
    forward = now[0] - before[0], now[1] - before[1]
    loss.backward()
    return forward, (traffic.calls - now[0], traffic.bytes - now[1])


def test_collectives_of_a_step_without_sequence_parallelism(ranks):
    """Two all-reduces a layer each way, one of the embedding, one of the output layer's dx; the loss gathers
    three numbers a token. torch's tensor parallelism at its best has 21."""
    activation, loss = 4 * 2 * SHAPE.seq * SHAPE.hidden, 4 * 3 * 2 * SHAPE.seq * 2  # gathered
    forward, backward = (4 * 2 + 1 + 1, (4 * 2 + 1) * activation + loss), (4 * 2 + 1, (4 * 2 + 1) * activation)
    assert ranks(collectives, False) == [(forward, backward)] * 2


def test_collectives_of_a_step_with_sequence_parallelism(ranks):
    """Forward: gather and scatter around each half of a layer, scatter the embedding, gather for the output layer,
    the loss. Backward: their conjugates, the input of 9 column-parallel matmuls again, and 9 norms' gradients (which
    an owner of `main_grad` sums once a step instead)."""
    layers, norms = 4, 2 * 4 + 1
    forward, backward = layers * 4 + 1 + 1 + 1, layers * 4 + 1 + 1 + (2 * layers + 1) + norms
    for (f, _), (b, _) in ranks(collectives, True):
        assert (f, b) == (forward, backward)
