"""Small files, small functions, few arguments: what does not fit must become simpler first."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [p for room in ("core", "tests", "examples", "benchmarks") for p in sorted((ROOT / room).rglob("*.py"))]
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def functions_and_globals():
    """[(where, function, lines)], and where a `global` statement is."""
    functions, statements = [], []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTION):
                functions.append((f"{name}:{node.lineno}", node.name, node.end_lineno - node.lineno + 1))
            elif isinstance(node, ast.Global):
                statements.append(f"{name}:{node.lineno}")
    return functions, statements


def test_files_have_at_most_400_lines():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_functions_have_at_most_60_lines():
    functions, _ = functions_and_globals()
    assert len(functions) > 5000
    assert not [function for function in functions if function[2] > 60]


def test_nothing_in_core_uses_the_global_statement_below_the_roof():
    """`core/parallel_state/current.py` holds the one current state; everything else is passed explicitly."""
    _, statements = functions_and_globals()
    assert {where.partition(":")[0] for where in statements if where.startswith("core/")} == {
        "core/parallel_state/current.py"
    }
