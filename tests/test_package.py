"""The distribution: pure Python, nothing imported that is not asked for."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import core
from core.__main__ import COMMANDS
from core.__main__ import main as command

ROOT = Path(__file__).parents[1]


def run(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_core_dependencies_stay_few():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"paracore": "core.__main__:main"}
    names = sorted(line.split(">")[0] for line in project["dependencies"])
    assert names == ["einops", "numpy", "tensorstore", "torch", "zarr"]
    assert project["name"] == "paracore"


def test_parallel_state_imports_no_model_and_no_extra():
    code = "import sys, core.parallel_state.state; print(*(m for m in sys.modules if m.startswith('core.')))"
    assert {name.split(".")[1] for name in run(code).split()} == {
        "elsewhere",
        "field_names",
        "lazy_exports",
        "parallel_state",
    }


def test_the_model_needs_only_core_dependencies():
    blocked = ("tokenizers", "tyro", "rich", "matplotlib", "transformers", "pytest", "hypothesis")
    code = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "import core.models.gpt, core.models.huggingface, core.training.run.loop\n"
        "import core.pipeline.run.single_stage, core.optimizer, core.data_parallel, core.tensor_parallel\nprint('ok')"
    )
    assert run(code).strip() == "ok"


def test_an_own_module_with_own_batches_needs_no_extra():
    """`initialize` with a module and batches of one's own: two steps, and no tokenizer, no page, no flags."""
    code = (
        "import sys\nextras = 'tokenizers', 'tyro', 'rich', 'matplotlib', 'transformers'\n"
        "sys.modules |= dict.fromkeys(extras)\n"
        "import torch\nfrom core.training import initialize\n"
        "class Batches:\n"
        "    def batch(self, step, rank=0, size=1): return {'input': torch.ones(4, 3), 'labels': torch.ones(4, 1)}\n"
        "config = {'device': 'cpu', 'training': {'train_steps': 2, 'global_batch_size': 4, 'micro_batch_size': 4}}\n"
        "loss = lambda y, part: ((y - part['labels']).square().sum(), y.numel())\n"
        "model, _, _, loader = initialize(torch.nn.Linear(3, 1), config, batches=Batches(), loss_fn=loss)\n"
        "print(len([float(model.train_step(batch).loss) for batch in loader]))"
    )
    assert run(code).strip() == "2"


def test_the_commands_are_listed_without_importing_one():
    code = "import sys\nfrom core.__main__ import main\nmain(['--help'])\nprint(*sys.modules)"
    *shown, imported = run(code).splitlines()
    assert {name for name in imported.split() if name.split(".")[0] in ("core", "torch")} == {"core", "core.__main__"}
    text = "\n".join(shown)
    listed = re.findall(r"^  (\w+) {2,}\S", text, re.M)
    wanted = "pretrain prepare inspect config generate evaluate checkpoint simulate doctor deepspeed huggingface"
    assert listed == list(COMMANDS) == wanted.split()
    assert all(importlib.util.find_spec(module) for module, _ in COMMANDS.values())
    assert max(map(len, shown)) <= 80


def test_a_command_gets_its_words(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paracore"])
    monkeypatch.delitem(sys.modules, "core.pipeline.simulate", raising=False)  # which another test may have imported
    with pytest.raises(SystemExit) as ended:
        command(["simulate", "zb-v", "--stages", "2", "--microbatches", "2"])
    assert ended.value.code == 0 and "bubble 14.3 %" in capsys.readouterr().out
    assert command(["--version"]) == 0 and capsys.readouterr().out == f"paracore {core.__version__}\n"
    assert command(["pertrain"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'pertrain'; did you mean pretrain?\n"


@pytest.fixture(scope="module")
def wheel_bin(tmp_path_factory):
    """The `bin` of a fresh environment that holds the wheel and, from this one, its dependencies."""
    made = tmp_path_factory.mktemp("wheel")
    source = made / "source"  # a copy: building leaves files behind
    source.mkdir()
    shutil.copytree(ROOT / "core", source / "core", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", str(made), str(source)], check=True, capture_output=True)
    (wheel,) = made.glob("paracore-*-py3-none-any.whl")
    assert core.__version__ in wheel.name
    venv.create(made / "venv", with_pip=False)
    packages = next((made / "venv" / "lib").glob("python*/site-packages"))
    install = [sys.executable, "-m", "pip", "--python", str(made / "venv" / "bin" / "python"), "install"]
    # pip takes what PYTHONPATH holds for installed
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, "-q", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, env=env)
    # a line of a .pth is a directory to import from; after the environment's own, so that the wheel wins
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return made / "venv" / "bin"


def in_wheel(wheel_bin, directory, *words):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [str(wheel_bin / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_wheel_trains_from_an_empty_directory(wheel_bin, tmp_path):
    """A folder of text to a falling loss with what the wheel installs, alone and under torchrun."""
    where = in_wheel(wheel_bin, tmp_path, "python", "-c", "import core; print(core.__file__, core.__version__)")
    assert str(wheel_bin.parent) in where
    assert "  pretrain     train a GPT" in in_wheel(wheel_bin, tmp_path, "paracore", "--help")
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"document {i} says the same again and again\n" * 20)
    prepared = in_wheel(wheel_bin, tmp_path, "paracore", "prepare", "--input", "text", "--output", "corpus")
    assert "next: torchrun --standalone --nproc-per-node 1 -m core.pretrain --data.train corpus" in prepared
    small = "--data.train corpus --training.train-steps 6 --training.log-interval 1 --model.num-layers 1 --device cpu"
    alone = in_wheel(wheel_bin, tmp_path, "paracore", "pretrain", *small.split())
    losses = [float(loss) for loss in re.findall(r"^step .*? loss (\d+\.\d+)", alone, re.M)]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert (tmp_path / "runs" / "pretrain" / "report.html").exists()
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = in_wheel(
        wheel_bin, tmp_path, *torchrun, "-m", "core.pretrain", *small.split(), "--training.output", "runs/2"
    )
    again = [float(loss) for loss in re.findall(r"^step .*? loss (\d+\.\d+)", both, re.M)]
    assert again == pytest.approx(losses, rel=1e-3)


def test_no_template_ignores_the_package():
    ignored = subprocess.run(["git", "check-ignore", "core/__init__.py"], cwd=ROOT, capture_output=True)
    assert ignored.returncode != 0
