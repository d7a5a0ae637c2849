"""Several tests at a time (`make test WORKERS=n`): one worker has the pool of ranks, the others what needs none."""

import ast
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]


@cache
def tests_with_ranks(path: str) -> frozenset[str]:
    """The functions of a file that take the fixture `ranks`."""
    functions = [n for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)]
    return frozenset(f.name for f in functions if "ranks" in [argument.arg for argument in f.args.args])


class OnePool(LoadScopeScheduling):
    """Tests that take `ranks` go to one worker; the rest file by file to whichever is free."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, test = nodeid.partition("::")
        return "pool" if test.partition("[")[0] in tests_with_ranks(path) else path
