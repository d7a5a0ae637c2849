"""The list of tests that take seconds."""

import ast

from tests import slow
from tests.slow import ROOT, mark, slow_tests


class Item:
    def __init__(self, nodeid):
        self.nodeid, self.marks = nodeid, []

    def add_marker(self, marker):
        self.marks.append(marker.name)


def test_every_line_names_a_function_that_is_there():
    """Else a test that was renamed comes back into `make test`, and nobody sees why that is slow."""
    gone = []
    for line in slow_tests():
        path, *_, name = line.partition("[")[0].split("::")
        tree = ast.parse((ROOT / path).read_text())
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            gone.append(line)
    assert len(slow_tests()) > 100 and gone == []


def test_what_took_long_is_added_to_what_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(slow, "LIST", tmp_path / "slow.txt")
    monkeypatch.setattr(slow, "slow_tests", lambda: frozenset({"tests/models/test_lora.py::test_b"}))
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.models.test_lora" name="test_a[1-x.y]" time="7.1"/>'
        '<testcase classname="tests.models.test_lora" name="test_quick" time="0.1"/>'
        '<testcase classname="tests.dist_checkpointing.test_zarr_store.TestMisuse" name="test_c" time="2"/>'
        '<testcase classname="tests.zoo.test_modules" name="test_a_cover[x]" time="9"/></testsuite></testsuites>'
    )
    slow.main(str(tmp_path / "report.xml"))
    assert (tmp_path / "slow.txt").read_text().split() == [
        "tests/dist_checkpointing/test_zarr_store.py::TestMisuse::test_c",
        "tests/models/test_lora.py::test_a[1-x.y]",
        "tests/models/test_lora.py::test_b",
    ]


def test_only_what_is_listed_is_marked():
    items = [Item(min(slow_tests())), Item("tests/test_slow.py::test_only_what_is_listed_is_marked")]
    mark(items)
    assert [item.marks for item in items] == [["full"], []]


def test_only_full_cases_are_skipped_and_only_after_the_end(monkeypatch):
    class Full:
        def get_closest_marker(self, name):
            return name == "full" or None

    class Quick:
        def get_closest_marker(self, name):
            return None

    monkeypatch.delenv("TESTS_END", raising=False)
    assert not slow.is_too_late(Full())
    monkeypatch.setenv("TESTS_END", "1")
    assert slow.is_too_late(Full()) and not slow.is_too_late(Quick())
    monkeypatch.setenv("TESTS_END", "9e9")
    assert not slow.is_too_late(Full())
