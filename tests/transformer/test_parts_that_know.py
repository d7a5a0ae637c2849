"""A part of a program's own that says that it knows of context ranks knows nothing of columns by that."""

import warnings

import pytest
from torch.nn import functional as F

from core.parallel_state import context_batch
from tests.states import state
from tests.zoo.own_model import Feedforward, batch, in_layer, train


class Knowing(Feedforward):
    knows_context = True


def messages(is_split, tp, cp):
    """What is told while a model trains whose part normalises this rank's columns, or nothing."""
    between = (lambda y: F.normalize(y, dim=-1)) if is_split else F.gelu
    ps = state(tp=tp, cp=cp)

    def loss(model, step):
        tokens, labels = batch(step)
        return model(**context_batch({"tokens": tokens, "labels": labels}, ps)).mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(in_layer(ps, lambda place: Knowing(place, between)), steps=4, loss=loss)
    return [str(w.message) for w in caught if "h/tp" in str(w.message) or "columns" in str(w.message)]


@pytest.mark.parametrize("cp", [1, 2])
def test_its_columns_are_followed(ranks, cp):
    for told in ranks(messages, True, 2, cp, world=2 * cp):
        assert len(told) == 1, told


def test_what_is_right_is_not_told(ranks):
    assert ranks(messages, False, 2, 1, world=2) == [[], []]


def test_one_tensor_rank_has_all_columns():
    assert messages(True, 1, 1) == []
