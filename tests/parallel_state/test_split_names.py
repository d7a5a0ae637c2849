"""What is said of torch's functions along a split dim: those called elementwise are; what no table knows is tried."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.parallel_state.by_hand import split_axes
from core.parallel_state.by_hand.split_functions import Finding, outcome_of
from core.parallel_state.by_hand.split_names import BY_ELEMENT, KIND_OF, kind_of
from core.parallel_state.by_hand.split_trials import tried

# of another tensor's shape or class, or in place: not called here
UNLIKE = {"broadcast_tensors", "copy", "fill", "data", "grad", "type_as", "where", "isin", "map", "map2"}


def columns(seed=0, *shape):
    x = torch.rand(*(shape or (3, 8)), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    x.axes = split_axes.of_dims(x.shape, {x.dim() - 1})
    return x


def calls(name):
    """(function, arguments) of one and of two tensors, where torch has it."""
    owners = (torch, Tensor, F, torch.special)
    for function in (getattr(owner, name, None) for owner in owners):
        if callable(function):
            yield function, (columns(),)
            yield function, (columns(), columns(1))


def runs(function, args):
    try:
        return function(*args)
    except Exception:
        return None


def test_elementwise_functions_make_of_halves_halves():
    seen = set()
    for name in sorted(BY_ELEMENT - UNLIKE):
        for function, args in calls(name):
            result = runs(function, args)
            if isinstance(result, Tensor) and result.shape == args[0].shape:
                if not name.endswith("_like"):
                    assert tried(function, args, {}, result) is not None, name
                seen.add(name)
    assert len(seen) > 110, sorted(seen)


def test_every_function_is_of_one_kind():
    assert not BY_ELEMENT & set(KIND_OF)
    assert kind_of("normal_") == kind_of("normal") == "draw" and kind_of("index_add_") == "scatter"
    assert kind_of("unsafe_split") == "cut" and kind_of("permute_copy") == "permutation"
    assert kind_of("special_expit") == "element" and kind_of("special_softmax") == "reduction"
    assert kind_of("_foreach_add_") == "element" and kind_of("something_new") == ""
    assert {kind_of(name) for name in ("poisson", "binomial", "_standard_gamma", "random_")} == {"draw"}
    assert {kind_of(name) for name in ("alias_copy", "detach_copy", "expand_copy", "fill_")} == {"element"}


@pytest.mark.parametrize(
    ("function", "is_right"),
    [
        (lambda x: x.repeat_interleave(2, 0), True),
        (lambda x: torch.stack((x, x)), True),
        (lambda x: F.pad(x, (0, 0, 1, 0)), True),
        (lambda x: torch.trapezoid(x, dim=0), True),
        (lambda x: F.pad(x, (1, 0)), False),
        (lambda x: torch.trapezoid(x), False),
        (lambda x: torch.fliplr(x), False),
        (F.pdist, False),
        (torch.msort, True),
        (lambda x: torch.rand_like(x) + x, False),
    ],
)
def test_a_function_of_which_nothing_is_known_is_tried(function, is_right):
    x = columns()
    result = function(x)
    after = torch.random.get_rng_state()
    outcome = outcome_of(function, "something_new", (x,), {}, result)
    assert isinstance(outcome, Finding) != is_right
    # the program's next draw is what it was
    assert torch.equal(torch.random.get_rng_state(), after)


def test_blocks_of_a_head_stay_together():
    x = columns(0, 3, 8)
    x.axes = (*split_axes.plain([3]), ((2, True), (4, False)))
    by_head = lambda x: x.unflatten(-1, (-1, 4)).flip(-1)  # noqa: E731
    (found,) = outcome_of(by_head, "something_new", (x,), {}, by_head(x))
    assert found[1] == (*split_axes.plain([3]), ((2, True),), *split_axes.plain([4]))
    assert isinstance(outcome_of(by_head, "another", (x,), {}, x.flip(-1)), Finding)


def test_an_operand_with_an_entry_for_each_column_is_cut_alike():
    x, scale = columns(), torch.rand(8, dtype=torch.float64)
    scaled = lambda x, scale: x * scale  # noqa: E731
    (found,) = tried(scaled, (x, scale), {}, scaled(x, scale))
    assert found[1] == x.axes


def test_what_is_tried_writes_into_copies():
    """A custom operator says nothing of what it writes into."""
    x, counts = columns(), torch.zeros(1, dtype=torch.float64)

    def counting(x, counts):
        counts.add_(1)
        return x.mul_(2)

    result = counting(x.clone(), counts)
    before = x.clone()
    tried(counting, (x, counts), {}, result)
    assert torch.equal(x, before) and counts.item() == 1


def test_collectives_are_not_tried():
    collective = torch.ops._c10d_functional.all_to_all_single
    assert outcome_of(collective, "all_to_all_single", (columns(),), {}, torch.ones(3, 8)) is None
