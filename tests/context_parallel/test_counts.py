"""What a program makes of sizes of a batch's rows: counts over steps and rates are told, shapes are not."""

import math

import numpy as np
import pytest
import torch

from core.context_parallel.rows.counts import RowCounts
from core.context_parallel.rows.twins import known_size
from core.parallel_state.by_hand.part_sizes import counted

TOLD = {
    "0 + n": lambda n: 0 + n,
    "n + 1": lambda n: n + 1,
    "n / 2": lambda n: n / 2,
    "2 / n": lambda n: 2 / n,
    "sqrt": lambda n: math.sqrt(n),
    "over steps": lambda n: 100 / n,
    "n ** 0.5": lambda n: n**0.5,
    "n * 0.5": lambda n: n * 0.5,
    "2 n, where 4 ranks have all": lambda n: 2 * n / 3,
    "times a size of rows": lambda n: n * known_rows(4, 4) / 3,
}
NOT_TOLD = {
    "times the ranks": lambda n: 0 + 4 * n / 3,
    "times the ranks and more": lambda n: (n * 8) ** 0.5,
    "a divisor of a loss": lambda n: 1 / n,
    "a range": range,
    "one less": lambda n: n - 1,
    "a half of them": lambda n: n // 2,
    "a tensor": lambda n: torch.tensor([0.5, n]),
    "a tensor of a float": lambda n: torch.full((1,), float(n)),
    "a tensor over two lines": lambda n: torch.tensor(
        [0.5, n],
    ),
    "an array": lambda n: np.array([0.5, n]),
    "places": np.arange,
    "chunks": lambda n: math.ceil(n / 5),
    "sequences": lambda n: n / known_rows(8, 16),
    "a sum over the ranks": lambda n: torch.tensor(sum([n, n])),
    "by a modulus": lambda n: pow(n, 2, 5),
    "a format": lambda n: f"{n:.2f}",
    "compared": lambda n: n > 3,
    "text": str,
}
counts_heard = []


def known_rows(size, whole):
    return counted(known_size(size, whole), RowCounts(lambda: counts_heard.append(size), 4, is_total=True))


@pytest.mark.parametrize("use", [*TOLD, *NOT_TOLD])
def test_counts_and_rates_of_rows(use):
    counts_heard.clear()
    made = (TOLD | NOT_TOLD)[use](known_rows(8, 16))
    assert bool(counts_heard) == (use in TOLD)
    assert use != "0 + n" or (made == 8 and type(made) is int)


def test_what_code_of_ours_computes_is_none_of_a_program_s():
    counts_heard.clear()
    exec("n / 2, 0 + n, sqrt(n)", {"__name__": "core.some.room", "n": known_rows(8, 16), "sqrt": math.sqrt})
    assert not counts_heard


def test_what_is_counted_in_an_evaluation_is_summed_later():
    counts_heard.clear()
    with torch.no_grad():
        assert 0 + known_rows(8, 16) == 8 and not counts_heard
