"""docs/compatibility.md, written from the cases: `python -m tests.zoo.compatibility` writes it."""

import importlib
from pathlib import Path

from tests.zoo.case import Case, Family

# every module here has `FAMILY`, and a test file of the same name with `test_`
FAMILIES: list[str] = [
    "modules",
    "tools",
    "own_modules",
    "experts",
    "context_losses",
    "context_batches",
    "context_labels",
    "context_vocabulary",
    "context_wholes",
    "context_means",
    "context_hooks",
    "context_teachers",
    "own_parts",
    "habits",
    "schedule_files",
    "failures",
    "deepspeed",
]
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD = """# Other people's programs: right, told or refused

What comes of a torch program's habits here. *Right*: the numbers of one process, DDP or torch's own tool, compared
in float64. *Told*: one message at first use, with the remedy. *Refused*: an exception before anything moved.
This page is written by the tests that try every row (`python -m tests.zoo.compatibility`), and checked by one.
"""


def families() -> list[Family]:
    """All of them, in the page's order."""
    return [importlib.import_module(f"tests.zoo.{name}").FAMILY for name in FAMILIES]


def _row(case: Case, family: Family) -> str:
    others: dict[str, list[str]] = {}
    for variation, (outcome, _) in case.elsewhere.items():
        others.setdefault(outcome, []).append(str(variation))
    there = [f"{', '.join(variations)}: {outcome}" for outcome, variations in others.items()]
    outcome = "; ".join([case.outcome, *there])
    return f"| {case.what} | {outcome} | {case.remedy} |".replace("  |", " |")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    found = families()
    counts = [f"{f.title}: {len(f.cases)} x {len(f.variations)}" for f in found]
    parts.append(f"{'; '.join(counts)}. Silently wrong: 0.\n" if counts else "")
    for family in found:
        names = [case.what for case in family.cases]
        assert len(set(names)) == len(names), f"{family.title}: a row stands twice"
        rows = "\n".join(_row(case, family) for case in family.cases)
        parts.append(f"## {family.title}\n\n{family.text}\n\n| what | outcome | remedy |\n|---|---|---|\n{rows}\n")
    return "\n".join(part for part in parts if part)


if __name__ == "__main__":
    PAGE.write_text(page())
