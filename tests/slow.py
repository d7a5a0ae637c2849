"""Tests of which one takes seconds: they run in `make test-full`, so that `make test` takes minutes.

`python -m tests.slow REPORT`, of a run with `--junitxml REPORT`, adds those of it to tests/slow.txt.
"""

import os
import sys
import time
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "slow.txt"
SECONDS = 0.8
# of the run that a user starts: 40 s of `make test` in all
FOLDERS = {"tests/training/": 0.25, "tests/examples/": 0.25}
# the covers of what a change breaks most easily stay in `make test`
KEPT = (
    "tests/parity/test_pipeline.py::test_a_cover_of_all_schedules_equals_one_process",
    "tests/parity/test_data_parallel.py::test_a_cover_of_stages_and_schedules_equals_one_process",
    "tests/parity/test_context.py::test_a_cover_of_pairs_equals_one_process[2]",
    "tests/zoo/test_modules.py::",
    "tests/zoo/test_compatibility.py::",
    "tests/test_",
)


@cache
def slow_tests() -> frozenset[str]:
    """Their node ids."""
    return frozenset(LIST.read_text().splitlines())


def mark(items) -> None:
    for item in items:
        if item.nodeid in slow_tests():
            item.add_marker(pytest.mark.full)


def is_too_late(item) -> bool:
    """Whether it begins after `TESTS_END`, in seconds since 1970, and is none of `make test` (docs/decisions/164)."""
    end = os.environ.get("TESTS_END")
    return end is not None and time.time() > float(end) and item.get_closest_marker("full") is not None


def _node_id(case) -> str:
    """Of a report's `tests.models.test_lora[.TestClass]` and `test_name[values]`."""
    names = case.get("classname").split(".")
    classes = []
    while not (path := ROOT.joinpath(*names).with_suffix(".py")).is_file():
        classes.insert(0, names.pop())
    return "::".join([path.relative_to(ROOT).as_posix(), *classes, case.get("name")])


def _limit(node: str) -> float:
    return next((limit for folder, limit in FOLDERS.items() if node.startswith(folder)), SECONDS)


def main(report: str) -> None:
    cases = ElementTree.parse(report).iter("testcase")
    seconds = {_node_id(case): float(case.get("time")) for case in cases}
    found = {node for node, took in seconds.items() if took > _limit(node) and not node.startswith(KEPT)}
    LIST.write_text("\n".join(sorted(slow_tests() | found)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
