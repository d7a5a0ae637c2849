"""What a program does with a number that it has just read, by its code."""

import math

import pytest

from core.context_parallel.rows import uses

# ours, which is passed over: `read()` is the call under way
CODE = """
class Number:
    def __init__(self, asks):
        self.asks, self.found = asks, None

    def read(self):
        self.found = self.asks()
        return 2.0

    def __len__(self):
        self.found = self.asks()
        return 2
"""
OURS = {"__name__": "core.some_module"}
exec(CODE, OURS)
Number = OURS["Number"]


def in_line(x):
    return x.read() > 1


def chosen(x):
    return min(1.0, x.read())


def by_name(x):
    value = x.read()
    if value < 3:
        return 1
    return 0


def from_function(x):
    def read(x):
        return x.read()

    value = read(x)
    if value >= 3:
        return 1
    return 0


def in_lambda(x):
    read = lambda x: x.read()  # noqa: E731
    return read(x) <= 3


def for_a_log(x):
    value = x.read()
    logged = {"loss": value}
    if len(logged) > 2:
        return 1
    return logged


def in_a_list(x):
    kept = []
    kept.append(x.read())
    return kept


@pytest.mark.parametrize("program", [in_line, chosen, by_name, from_function, in_lambda])
def test_compared(program):
    number = Number(uses.is_compared)
    program(number)
    assert number.found


@pytest.mark.parametrize("program", [for_a_log, in_a_list])
def test_not_compared(program):
    number = Number(uses.is_compared)
    program(number)
    assert number.found is False


def quotient(x):
    return 1 / len(x)


def root(x):
    return 1 + 1 / math.sqrt(len(x))


def power_of_name(x):
    n = len(x)
    return n**-0.5


def size(x):
    return [0] * len(x)


def halves(x):
    n = len(x)
    return n // 2, [0] * n


@pytest.mark.parametrize("program", [quotient, root, power_of_name])
def test_rate(program):
    number = Number(uses.is_rate)
    program(number)
    assert number.found


@pytest.mark.parametrize("program", [size, halves])
def test_size(program):
    number = Number(uses.is_rate)
    program(number)
    assert number.found is False


def test_code_that_was_made_at_run_time():
    number = Number(uses.is_compared)
    exec("value = number.read()\nflag = value > 1", {"number": number})
    assert number.found
