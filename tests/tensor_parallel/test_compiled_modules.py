"""Modules of a program's own that are compiled: ranks meet in the same places, whichever of them compiles."""

import contextlib

import pytest
import torch
from torch._dynamo import eval_frame

from tests.zoo.own_model import Model, built, states, tensor_rank, train, whole_weights


def trained(eager_ranks, steps):
    found = []
    for ps in states():
        model = built(ps)
        model.compile(backend="eager")
        train(model, steps=2)
        with torch.compiler.set_stance("force_eager" if tensor_rank() in eager_ranks else "default"):
            train(model, steps=steps)
        torch._dynamo.reset()
        found.append(whole_weights(model, ps))
    return max((found[0][name] - found[1][name]).abs().max().item() for name in found[0])


@pytest.mark.parametrize("eager_ranks", [(), (0,), (1,), (0, 1)], ids=str)
def test_one_rank_runs_as_it_was_written(ranks, eager_ranks):
    """A recompilation that was refused on one, say. Forwards 3 to 9: two of them compare gradients of outputs."""
    assert max(ranks(trained, eager_ranks, 7, world=2)) < 1e-5


class Raising(Model):
    def forward(self, tokens):
        super().forward(tokens)
        raise KeyError("a mistake")


def stances_after_a_raise():
    seen = []
    ps, _ = states()
    for forwards in (1, 2):
        model = built(ps, Raising)
        for _ in range(forwards):
            with contextlib.suppress(KeyError):
                train(model, steps=1)
        seen.append(eval_frame._stance.stance)
    return seen


def test_a_forward_that_raises_leaves_the_compiler_as_it_was(ranks):
    assert ranks(stances_after_a_raise, world=2) == [["default", "default"]] * 2
