"""Small files, small functions, few arguments: what does not fit must become simpler first."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [p for room in ("core", "tests", "examples", "benchmarks") for p in sorted((ROOT / room).rglob("*.py"))]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


def functions():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, FUNCTION):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_files_have_at_most_400_lines():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_functions_have_at_most_60_lines():
    long = {name: n for name, node in functions() if (n := node.end_lineno - node.lineno + 1) > 60}
    assert not long


def test_nothing_in_core_uses_the_global_statement_below_the_roof():
    """`core/parallel_state/current.py` holds the one current state; everything else is passed explicitly."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.parts[len(ROOT.parts)] == "core" and path.name != "current.py"
        for node in nodes(path)
        if isinstance(node, ast.Global)
    ]
    assert not found
