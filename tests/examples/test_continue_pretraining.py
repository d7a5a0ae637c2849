"""examples/continue_pretraining.md, block by block as it stands: a folder in, a folder out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "continue_pretraining.md"


def blocks(page):
    """(language, text) of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)


def run_block(language, text, directory):
    """Its stdout, run in `directory` as a reader would in the clone."""
    command = [warm.python(), "-c", text] if language == "python" else ["bash", "-ec", text]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, "HF_HUB_OFFLINE": "1"}
    env["PYTHON_EXEC"] = warm.python()  # of the ranks that torchrun starts
    done = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.full
def test_the_page(tmp_path):
    for name in ("docs", "examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = [run_block(language, text, tmp_path) for language, text in blocks(PAGE)]
    _, _, trained, exported, compared = said
    first = re.search(r"first step here and in one process: .*, max \|difference\| (\S+)", trained)
    assert first and float(first[1]) < 1e-4
    assert "hf-continued" in exported and "max |logit difference| on 4 prompts: " in exported
    found = re.fullmatch(r"source (\S+), continued (\S+)\n", compared)
    assert found and float(found[2]) < float(found[1]) - 1
