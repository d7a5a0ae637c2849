"""The recipes as a user runs them: in one process here, under torchrun in the full suite."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()


def torchrun(script, *flags, cwd):
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *flags], env=env, cwd=cwd, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def alone(script, *flags):
    """Run it in this process, which spares it the imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, flags)])
        torch.seed()  # as in a process that nobody has seeded
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def losses(text):
    return [float(number) for number in re.findall(r"^step +\d+\S*  loss (\d+\.\d+)", text, re.M)]


def test_quickstart(capsys):
    alone("quickstart.py")
    found = losses(capsys.readouterr().out)
    assert len(found) == 4 and found[-1] < found[0] - 0.5


@pytest.mark.full
def test_quickstart_over_two_tensor_ranks(capsys, tmp_path):
    alone("quickstart.py")
    assert losses(torchrun("quickstart.py", cwd=tmp_path)) == pytest.approx(losses(capsys.readouterr().out), abs=1e-3)


def swapped(text):
    found = re.findall(r"^(gated SiLU|squared ReLU) +loss (\d+\.\d+) -> (\d+\.\d+)$", text, re.M)
    return {name: (float(first), float(last)) for name, first, last in found}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A directory whose runs/corpus is small: the default corpus takes seconds to prepare."""
    directory = tmp_path_factory.mktemp("texts")
    sources = directory / "sources"
    for i in range(30):
        (sources / f"part{i % 3}").mkdir(parents=True, exist_ok=True)
        lines = [f"def f{i}_{j}(x):\n    return x * {i * j % 7} + {j}\n\n" for j in range(8)]
        (sources / f"part{i % 3}" / f"{i}.py").write_text("".join(lines))
    (sources / "broken.txt").write_bytes(b"\xff\xfe\x00")
    return sources


def test_bring_your_own_text(corpus, tmp_path, capsys):
    flags = ["--vocab-size", "300", "--steps", "40", "--sequence-length", "32", "--output", tmp_path / "own"]
    alone("bring_your_own_text.py", corpus, *flags)
    text = capsys.readouterr().out
    found = losses(text)
    assert len(found) == 3 and found[-1] < found[0] - 1
    assert "skipped: 1" in text and "--- and the model goes on ---" in text


@pytest.mark.full
def test_bring_your_own_text_over_two_ranks(corpus, tmp_path):
    text = torchrun(
        "bring_your_own_text.py",
        str(corpus),
        "--vocab-size",
        "300",
        "--steps",
        "20",
        "--sequence-length",
        "32",
        cwd=tmp_path,
    )
    assert len(losses(text)) == 2 and text.count("--- and the model goes on ---") == 1


def test_a_folder_without_text_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        alone("bring_your_own_text.py", tmp_path, "--output", tmp_path / "own")
    assert stopped.value.code and "error: " in capsys.readouterr().err
    assert not list(tmp_path.glob("own/*.idx"))


@pytest.mark.full
@pytest.mark.parametrize("script", ["custom_layer_spec.py", "bring_your_own_text.py", "pretrain_gpt.py"])
def test_without_extras_an_example_ends_in_one_line(script, corpus, tmp_path):
    for name in ("tokenizers", "tyro", "rich", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('No module named {name}')")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    words = [str(corpus)] if script == "bring_your_own_text.py" else []
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode in (1, 2)
    assert re.fullmatch(r"error: the (tokenizer|command line) needs .*: pip install tokenizers[ \w]*\n", done.stderr)


@pytest.mark.full
def test_a_custom_part(tmp_path):
    """Two tensor ranks and one: both parts learn, and the layout changes nothing. Uses the default corpus."""
    both = swapped(torchrun("custom_layer_spec.py", cwd=tmp_path))
    assert both.keys() == {"gated SiLU", "squared ReLU"}
    assert all(last < first for first, last in both.values())
    command = [warm.python(), str(EXAMPLES / "custom_layer_spec.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    one = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=600)
    for name, numbers in swapped(one.stdout).items():
        assert numbers == pytest.approx(both[name], abs=1e-3)


@pytest.mark.full
def test_the_readmes_two_commands(corpus, tmp_path):
    """From a folder to a falling loss, word for word but for the folder's name and a model that takes seconds."""
    block = re.search(r"```\n(python -m core\.datasets\.prepare --input FOLDER .*\n)(torchrun .*\n)```", README)
    assert block is not None
    prepare, run = (shlex.split(line.replace("FOLDER", str(corpus))) for line in block.groups())
    small = "--training.train-steps 30 --training.log-interval 5 --data.sequence-length 32 --model.num-layers 1"
    launcher = [warm.python(), "-m", "torch.distributed.run"]
    script = [str(ROOT / word) if word.startswith("examples/") else word for word in run[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in ([warm.python(), *prepare[1:]], [*launcher, *script, *small.split()]):
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    found = [float(number) for number in re.findall(r"^step .* \| loss (\d+\.\d+) ", done.stdout, re.M)]
    assert len(found) == 7 and found[-1] < found[0] - 1
    for name in ("run.toml", "metrics.jsonl", "report.html", "report.png"):
        assert (tmp_path / "runs" / "pretrain" / name).stat().st_size > 0
