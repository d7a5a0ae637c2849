"""The distribution: pure Python, nothing imported that is not asked for."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_core_dependencies_stay_few():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = sorted(line.split(">")[0] for line in project["dependencies"])
    assert names == ["einops", "numpy", "tensorstore", "torch", "zarr"]
    assert project["name"] == "paracore"


def test_parallel_state_imports_no_model_and_no_extra():
    code = "import sys, core.parallel_state.state; print(*(m for m in sys.modules if m.startswith('core.')))"
    assert {name.split(".")[1] for name in run(code).split()} == {"parallel_state", "lazy_exports"}


def test_the_model_needs_only_core_dependencies():
    blocked = ("tokenizers", "tyro", "rich", "matplotlib", "transformers", "pytest", "hypothesis")
    code = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "import core.models.gpt, core.models.huggingface, core.training.run.loop\n"
        "import core.pipeline.run.single_stage, core.optimizer, core.data_parallel, core.tensor_parallel\nprint('ok')"
    )
    assert run(code).strip() == "ok"


def test_no_template_ignores_the_package():
    ignored = subprocess.run(["git", "check-ignore", "core/__init__.py"], cwd=ROOT, capture_output=True)
    assert ignored.returncode != 0
