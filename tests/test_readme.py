"""What the README says is what the project does."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from core.datasets import TokenFileWriter
from core.training import RunConfig
from core.training.config.sources import merge

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXTS = {"README.md": README, "core/pretrain.py": (ROOT / "core" / "pretrain.py").read_text()}


def commands():
    for name, text in TEXTS.items():
        for found in re.finditer(r"torchrun --standalone (?:\\\n|[^\n`])*", text):
            yield pytest.param(found.group().replace("\\\n", " ").split("#")[0], id=name)


@pytest.mark.parametrize("command", list(commands()))
def test_a_torchrun_command_describes_a_run_that_fits_together(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunConfig.from_dict({"training.global_batch_size": 64}).to_toml(
        "run.toml"
    )  # what commands name as the reader's own
    with TokenFileWriter(tmp_path / "corpus", vocab_size=9) as writer:
        writer.add_document([1] * 2000)
    command = command.replace("data/corpus", "corpus")
    words = shlex.split(command)
    script = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "core.pretrain")
    world = int(words[words.index("--nproc-per-node") + 1])
    merge(words[script + 1 :]).loaded().run.check(world)


def test_python_in_the_readme_parses():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        ast.parse(block)


def test_the_first_python_of_the_readme_runs():
    first = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    done = subprocess.run([sys.executable, "-c", first], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/benchmarks.md",
        "docs/concepts/pipeline.md",
        "docs/concepts/checkpoint.md",
    ],
)
def test_links_and_paths_exist(name):
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:core|tests|docs|examples|benchmarks)/[\w/.]+)`", text)
    missing = [p for p in paths if not (ROOT / p.split("::")[0]).exists()]
    missing += [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]
    assert (links or paths) and not missing


@pytest.mark.parametrize("target", re.findall(r"^make (\S+)", README, re.M))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
