"""What rows are of whole sequences: gradients but for a number of ranks, sizes with what they are of all."""

import torch

from core.context_parallel.rows.twins import are_proportional, differ, known_size
from core.parallel_state.by_hand.part_sizes import number_of_part, whole_number
from core.parallel_state.by_hand.split_tensor import Call

ROWS = torch.tensor([[1.0, -2.0], [0.5, 0.0]], dtype=torch.float64)
RANKS = 4


def test_a_mean_or_a_sum_of_rows():
    assert are_proportional(ROWS, ROWS, (1, RANKS))
    assert are_proportional(RANKS * ROWS, ROWS, (1, RANKS))
    assert not are_proportional(2 * ROWS, ROWS, (1, RANKS))
    assert not are_proportional(ROWS.flip(0), ROWS, (1, RANKS))


def test_nothing_and_what_is_not_finite():
    none = torch.zeros_like(ROWS)
    assert are_proportional(none, none, (1, RANKS))
    assert not are_proportional(none, ROWS, (1, RANKS))
    assert not are_proportional(ROWS, none, (1, RANKS))
    assert are_proportional(ROWS * torch.inf, ROWS, (1, RANKS))


def test_rounding():
    rounded = ROWS.bfloat16() * 1.003
    assert are_proportional(rounded, ROWS.bfloat16(), (1, RANKS))
    assert not differ(rounded, ROWS.bfloat16())
    assert differ(ROWS * 1.003, ROWS)
    assert differ(ROWS.gt(0), ROWS.gt(0.6))


def test_sizes_know_what_they_are_of_all():
    rows = known_size(8, 16)
    assert (rows, whole_number(rows)) == (8, 16)
    made = {"-1": rows - 1, "2*": 2 * rows, "1/": 1 / rows, "**": rows**0.5, "n-": 20 - rows, "+n": rows + rows}
    wholes = {"-1": 15, "2*": 32, "1/": 1 / 16, "**": 4.0, "n-": 4, "+n": 32}
    assert {name: whole_number(x) for name, x in made.items()} == wholes
    assert whole_number(known_size(3, 3)) == 3


def test_a_count_of_tokens_is_a_plain_number():
    assert type(100 + known_size(8, 16)) is int
    assert type(0 + known_size(8, 16)) is int


def test_what_cannot_be_made_of_all():
    zero = number_of_part(8, 0, set(), whole=0)
    assert whole_number(1 / zero) == 1 / 8


def test_which_calls_write():
    def call(func, name):
        return Call(func, name, [], (), {}, None)

    assert call(torch.Tensor.add_, "add").writes
    assert call(torch.Tensor.__setitem__, "setitem").writes
    assert call(torch.Tensor.__imul__, "imul").writes
    assert call(torch.Tensor.data.__set__, "data").writes
    assert not call(torch.Tensor.__add__, "add").writes
    assert not call(torch.Tensor.add, "add").writes
