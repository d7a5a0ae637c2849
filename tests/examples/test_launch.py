"""Job files: rendered, parsed by the languages they are written in, and run with stand-ins for Slurm's commands."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import warm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "launch" / "render.py"


def load(**more):
    module = runpy.run_path(str(SCRIPT))
    return lambda system, **fields: module["render"](system, module["Job"](**fields, **more))


render = load()


@pytest.mark.parametrize("fields", [{}, {"nodes": 4, "processes": 2, "name": "gpt-7b", "config": "runs/a.toml"}])
def test_slurm_is_a_shell_script(fields):
    text = render("slurm", **fields)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "@{" not in text
    lines = text.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(line) for line in directives) < first_command, "Slurm reads no directive after a command"
    assert f"#SBATCH --nodes={fields.get('nodes', 1)}" in directives
    assert "#SBATCH --signal=TERM@120" in directives
    assert "PYTORCH_ALLOC_CONF:-expandable_segments:True" in text


def test_what_a_cluster_asks_for_stands_in_the_slurm_file():
    more = {"partition": "gpu", "account": "lab", "qos": "high", "gres": "gpu:h100:8", "container": "reg/img:1"}
    text = render("slurm", **more, directives="exclusive; --mail-type=END", commands="module load cuda; source x")
    head, _, body = text.partition("set -euo pipefail")
    asked = [line for line in head.splitlines() if line.startswith("#SBATCH --")]
    wanted = ["partition=gpu", "account=lab", "qos=high", "gres=gpu:h100:8", "exclusive", "mail-type=END"]
    assert asked[-7:-1] == [f"#SBATCH --{word}" for word in wanted] and "gpus-per-node" not in text
    assert "\nmodule load cuda\nsource x\n" in body
    assert "srun --kill-on-bad-exit=1 --container-image=reg/img:1 " in body
    assert "-m core.pretrain --config run.toml" in body
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    with pytest.raises(ValueError, match="gres='a b' holds other characters"):
        render("slurm", gres="a b")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_slurm_passes_shellcheck():
    done = subprocess.run(["shellcheck", "-"], input=render("slurm"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("nodes", [1, 4])
def test_kubernetes_is_a_service_and_a_job(nodes):
    service, job = yaml.safe_load_all(render("kubernetes", nodes=nodes, processes=2, name="gpt"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == nodes and spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "PYTORCH_ALLOC_CONF", "value": "expandable_segments:True"} in container["env"]
    assert f"--nnodes={nodes}" in container["args"] and "--rdzv-endpoint=gpt-0.gpt:29500" in container["args"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert all(isinstance(word, str) for word in container["args"])


def test_wrong_values_are_told_at_once():
    with pytest.raises(ValueError, match=r"nodes=0 .*name='My Job' .*config='a b.toml'"):
        render("slurm", nodes=0, name="My Job", config="a b.toml")


def run_script(tmp_path, *flags):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [warm.python(), str(SCRIPT), *flags]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)


@pytest.mark.full
def test_the_command_checks_the_layout_first(tmp_path):
    (tmp_path / "run.toml").write_text("[parallel]\ntensor = 3\n")
    done = run_script(tmp_path, "slurm", "--nodes", "4")
    assert done.returncode == 1 and "world size 32 is not a multiple of tensor(3)" in done.stderr
    (tmp_path / "run.toml").write_text("[parallel]\ntensor = 16\n[model]\nnum_attention_heads = 16\n")
    done = run_script(tmp_path, "slurm", "--nodes", "4")
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash"), done.stderr
    (tmp_path / "run.toml").write_text("[data]\ntrain = 'on/the/cluster'\n[training]\nglobal_batch_size = 256\n")
    assert "cluster.bin does not exist" in run_script(tmp_path, "slurm", "--nodes", "4").stderr
    assert run_script(tmp_path, "slurm", "--nodes", "4", "--no-check").returncode == 0


STAND_INS = {
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "requeued $2"; fi\n',
    "srun": '#!/bin/bash\nshift\nexec "$@"\n',
}


@pytest.mark.full
def test_the_slurm_job_runs(tmp_path):
    """One node of two processes; a failing run is queued again."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "script.py").write_text(
        # one write for a line: two ranks share the output
        "import os, sys\nsys.stdout.write(' '.join(['rank', os.environ['RANK'], *sys.argv[1:]]) + '\\n')\n"
        "sys.exit(int(os.path.exists('fail')))\n"
    )
    job = render("slurm", processes=2, script="script.py", python=warm.python(), port=29512)
    (tmp_path / "job.sbatch").write_text(job)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "17", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}

    def submit():
        return subprocess.run(
            ["bash", "job.sbatch"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )

    done = submit()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 --config run.toml", "rank 1 --config run.toml"]
    (tmp_path / "fail").touch()
    assert "requeued 17" in submit().stdout
    env["SLURM_RESTART_COUNT"] = "10"
    last = submit()
    assert last.returncode == 1 and "requeued" not in last.stdout
