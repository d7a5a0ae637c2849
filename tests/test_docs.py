"""What docs/ shows is what the project prints and draws."""

import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from core.pipeline import simulate

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "concepts" / "pipeline.md", DOCS / "from_megatron.md"]


def commands():
    for page in PAGES:
        for found in re.finditer(r"^\$ python -m core\.pipeline\.simulate (.*)\n([^`]*)```", page.read_text(), re.M):
            yield pytest.param(found[1], found[2], id=found[1])


@pytest.mark.parametrize("flags, shown", list(commands()))
def test_a_command_prints_what_the_page_shows(flags, shown):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert simulate.main(shlex.split(flags)) == 0
    assert said.getvalue().strip().startswith(shown.strip())


PICTURES = {
    "1f1b": ["1f1b"],
    "zb-v": ["zb-v"],
    "1f1b-recompute": ["1f1b", "--recompute"],
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_by_the_project(name, tmp_path, capsys):
    made = tmp_path / "made.svg"
    assert simulate.main([*PICTURES[name], "--stages", "4", "--microbatches", "8", "--svg", str(made)]) == 0
    assert (DOCS / "concepts" / "images" / f"{name}.svg").read_text() == made.read_text(), "draw it again"


def test_every_picture_is_shown():
    shown = set(re.findall(r"\(images/(.*)\.svg\)", PAGES[0].read_text()))
    assert shown == PICTURES.keys() == {p.stem for p in (DOCS / "concepts" / "images").iterdir()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_parses(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_messages_of_the_troubleshooting_page_are_the_code_s():
    sources = "".join(path.read_text() for path in sorted((DOCS.parent / "core").rglob("*.py")))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # one string over several lines
    rows = re.findall(r"^\| (`[^|]+) \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 15
    missing = [m for m in messages if any(part not in sources for part in re.split(r" ?\[?\.\.\.\]? ?", m))]
    assert not missing


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path):
    """Every link of every page leads somewhere, every exported name has its docstring's page."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    api = (tmp_path / "site/api/core.pipeline/index.html").read_text()
    assert "core.pipeline.run.pipeline.Pipeline" in api
    assert (tmp_path / "site/source/core/pipeline/run/stage.py/index.html").exists()
