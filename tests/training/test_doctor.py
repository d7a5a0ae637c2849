"""The report on machines that lack something: each part is told with its remedy, and the exit code follows."""

import json
import os
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.parallel_state import ParallelState, environment
from core.training import RunConfig
from core.training.doctor import __main__ as command
from core.training.doctor import collect, fast_paths, selftest
from core.training.doctor import machine as here
from core.training.doctor.check import Check
from core.training.doctor.fast_paths import Compiler
from core.training.doctor.packages import EXTRAS, PYTHON, REQUIRED, packages, required, version_numbers
from core.training.doctor.show import as_json, failures, lines
from core.training.run.summary import describe

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def named(found):
    return {check.name: check for check in found}


@pytest.fixture
def quick(monkeypatch):
    """`main` without a compiler's trial, on a CPU that multiplies bfloat16."""

    class Works:
        def check(self, device):
            return Check(name="torch.compile", value="works", status="ok")

    monkeypatch.setattr(collect, "Compiler", Works)
    monkeypatch.setattr(environment, "bf16_slowdown", lambda device: 1.0)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_package_that_is_missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    check = named(packages())[name]
    assert (check.status, check.value, check.required) == ("missing", "not installed", True)
    assert check.remedy == f"pip install '{name}>={REQUIRED[name]}'"


def test_a_broken_and_an_old_package(monkeypatch, tmp_path):
    (tmp_path / "broken_one.py").write_text("import not_there_at_all")
    (tmp_path / "worse_one.py").write_text("raise ValueError('numpy.dtype size changed\\nmore')")
    (tmp_path / "old_one.py").write_text("__version__ = '1.9.3'")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert required("broken_one", "1").value == "does not import: No module named 'not_there_at_all'"
    worse = required("worse_one", "1")
    assert worse.value == "does not import: ValueError: numpy.dtype size changed" and "--force" in worse.remedy
    old = required("old_one", "1.10")
    assert (old.status, old.value, old.remedy) == ("missing", "1.9.3, older than 1.10", "pip install 'old_one>=1.10'")
    assert required("old_one", "1.9").status == "ok"


@pytest.mark.parametrize("extra, name", [(extra, name) for extra, parts in EXTRAS.items() for name in parts])
def test_an_extra_that_is_missing(extra, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    check = named(packages())[name]
    assert (check.status, check.required) == ("off", False) and check.value.startswith("not installed (")
    assert check.remedy == f"pip install {name}"


def test_packages_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dict(line.split(">=") for line in project["dependencies"]) == REQUIRED
    for extra, names in project["optional-dependencies"].items():
        if extra not in ("dev", "docs"):  # no run needs these
            assert {line.split(">=")[0].replace("-", "_") for line in names} == EXTRAS[extra].keys(), extra
    assert project["requires-python"] == ">=" + ".".join(map(str, PYTHON))


@pytest.mark.parametrize("text, numbers", [("2.13.0+cpu", (2, 13, 0)), ("1.10", (1, 10)), ("3.1.dev2", (3, 1))])
def test_versions_are_compared_as_numbers(text, numbers):
    assert version_numbers(text) == numbers


def test_a_missing_required_part_is_exit_code_1(quick, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert command.main(["--no-self-test", "--device", "cpu"]) == 1
    out = capsys.readouterr().out.splitlines()
    (at,) = (i for i, line in enumerate(out) if line.startswith("MISSING zarr "))
    assert out[at].endswith("  not installed") and out[at + 1].strip() == "-> pip install 'zarr>=3.1'"
    assert any(line.strip() == "-> pip install tyro" for line in out)
    assert out[-1].startswith("1 required and missing: zarr (")
    assert command.main(["--no-self-test", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["missing"] == ["zarr"]


def test_a_device_that_is_not_there_is_required(quick, capsys):
    assert command.main(["--no-self-test", "--device", "abacus"]) == 1
    assert "MISSING device" in capsys.readouterr().out


def test_nothing_missing_is_exit_code_0(quick, monkeypatch, capsys):
    good = Check(name="x", value="1", status="ok", required=True)
    off = Check(name="y", value="2", status="off", remedy="do it")
    monkeypatch.setattr(collect, "packages", lambda: [good, off])
    monkeypatch.setattr(collect, "machine", list)
    assert command.main(["--no-self-test", "--device", "cpu"]) == 0
    assert "everything required is there; 1 optional not, see -> (" in capsys.readouterr().out.splitlines()[-1]


def test_lines_are_aligned_and_json_holds_the_same():
    found = [
        Check(name="a", value="there", status="ok"),
        Check(name="longer", value="gone", status="missing", remedy="get it", required=True),
    ]
    assert [text for text, _ in lines(found, 1.26)] == [
        "ok      a       there",
        "MISSING longer  gone",
        "                -> get it",
        "1 required and missing: longer (1.3 s)",
    ]
    assert [Check(**row) for row in json.loads(as_json(found, 1.0))["checks"]] == found
    assert failures(found) == ["longer"] and failures(found[:1]) == []


# the compiler


def test_the_compiler_is_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    none = Compiler().check(CPU)
    assert none.status == "off" and none.value.startswith("no-such-compiler") and "apt-get install g++" in none.remedy
    script = tmp_path / "cxx"
    for text, want in (
        ("trial.cpp:1:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("clang: error: unsupported option '-fopenmp'", "libomp-dev"),
        ("ld: error: something else", "export CXX=clang++"),
    ):
        script.write_text(f'#!/bin/sh\necho first >&2\necho "{text}" >&2\nexit 1\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        check = Compiler().check(CPU)
        assert check.status == "off" and text in check.value and want in check.remedy
    script.write_text("#!/bin/sh\nexit 0\n")
    assert Compiler().check(CPU).status == "ok"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert Compiler().check(torch.device("cuda")).remedy == "pip install triton"


def test_a_compiler_that_hangs_is_given_up(monkeypatch, tmp_path):
    script = tmp_path / "cxx"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(fast_paths, "COMPILE_S", 0.05)
    assert "took more than 0.05 s" in Compiler().check(CPU).value


# fast paths


def test_attention_on_the_cpu_and_when_a_kernel_is_switched_off():
    assert fast_paths.attention(CPU).value.startswith("flash, math on cpu at float32")
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        check = fast_paths.attention(CPU)
        assert check.status == "off" and check.remedy == "torch.backends.cuda.enable_flash_sdp(True)"
        assert not torch.backends.cuda.flash_sdp_enabled(), "as it was"
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert fast_paths.attention(CPU).status == "ok"


def test_a_device_with_the_plain_kernel_alone(monkeypatch):
    monkeypatch.setattr(fast_paths, "KERNELS", {"efficient": fast_paths.KERNELS["efficient"]})
    check = fast_paths.attention(CPU)
    assert check.status == "off" and check.value == "none on cpu at float32; not there: efficient"


def test_no_fused_optimizer(monkeypatch):
    assert fast_paths.fused_adamw(CPU).status == "ok"
    monkeypatch.delattr(torch, "_fused_adamw_")
    assert fast_paths.fused_adamw(CPU).status == "off"


@pytest.mark.parametrize(("slowdown", "status"), [(41.3, "off"), (0.5, "ok")])
def test_bfloat16_that_a_cpu_emulates_is_told_by_the_doctor_and_by_a_run(slowdown, status, monkeypatch):
    monkeypatch.setattr(environment, "bf16_slowdown", lambda device: slowdown)
    check = fast_paths.bfloat16(CPU)
    assert check.status == status
    corpus = SimpleNamespace(num_tokens=(10, 5), train=None, validation_texts={})
    notes = {}
    for dtype in ("bf16", "fp32"):
        said = []
        run = RunConfig.from_dict({"model.bf16": dtype == "bf16"})
        describe({0: torch.nn.Linear(2, 2)}, ParallelState.single("cpu"), corpus, run, said.append)
        notes[dtype] = [line for line in said if line.startswith("note: ")]
    assert not notes["fp32"]
    if status == "off":
        text = "bf16 products take 41 x float32's here"
        assert text in check.value and "model.bf16=false" in check.remedy
        assert len(notes["bf16"]) == 1 and text in notes["bf16"][0]
    else:
        assert not notes["bf16"]


def test_the_probe_of_bfloat16_measures():
    assert environment.bf16_slowdown(CPU) > 0
    assert environment.bf16_slowdown(torch.device("meta")) == 1.0


def test_backends_that_torch_lacks(monkeypatch):
    monkeypatch.setattr(fast_paths, "available_backends", lambda: ["mpi"])
    monkeypatch.setattr(fast_paths, "default_backend", lambda kind: "nccl")
    found = named(fast_paths.backends(torch.device("cuda")))
    assert all(found[name].status == "missing" and found[name].required for name in ("gloo", "nccl"))
    assert found["other backends"].value == "mpi"


def test_accelerators_and_their_memory(monkeypatch):
    """Asking what is free makes a context, so only the device in use is asked."""
    module = SimpleNamespace(
        get_device_name=lambda i: f"Card {i}",
        get_device_properties=lambda i: SimpleNamespace(total_memory=80 << 30),
        mem_get_info=lambda i: {1: (79 << 30, 80 << 30)}[i],
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    check = fast_paths.devices(torch.device("cuda", 1))
    assert check.value == "cuda:0 Card 0, 80.0 GiB; cuda:1 Card 1, 80.0 GiB, 79.0 GiB free"


def test_an_accelerator_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidia0" or real(self))
    check = fast_paths.devices(CPU)
    assert check.status == "off" and "/dev/nvidia0" in check.value and "pytorch.org" in check.remedy


# the machine


def test_small_shared_memory(monkeypatch):
    facts = namedtuple("Facts", "f_blocks f_frsize f_bavail")
    monkeypatch.setattr(os, "statvfs", lambda path: facts(16384, 4096, 16000))
    check = here.shared_memory()
    assert check.status == "off" and check.value == "64 MiB, 62 MiB free" and "--shm-size" in check.remedy
    monkeypatch.setattr(os, "statvfs", lambda path: facts(1 << 20, 4096, 1 << 19))
    assert here.shared_memory().status == "ok"


@pytest.mark.parametrize(
    "limits, status, remedy",
    [
        ((1024, 1 << 20), "off", "ulimit -n 65536"),
        ((256, 2048), "off", "ulimit -n 2048"),
        ((1024, -1), "off", "ulimit -n 65536"),
        ((-1, -1), "ok", None),
        ((65536, 65536), "ok", None),
    ],
)
def test_open_files(limits, status, remedy, monkeypatch):
    monkeypatch.setattr(here.resource, "getrlimit", lambda kind: limits)
    check = here.open_files()
    assert (check.status, check.remedy) == (status, remedy)


def test_more_threads_than_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(here, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    check = here.cpu()
    assert check.status == "ok" and "8 cores; pinned to 4 of them (0-2,5)" in check.value
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    check = here.cpu()
    assert check.status == "off" and "limited to the time of 1.5" in check.value
    assert check.remedy.startswith("export OMP_NUM_THREADS=1,")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert here.cpu().status == "ok"


def test_the_containers_share_of_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(here, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{1 << 28}\n")
    assert here.memory().value.endswith("; this container may use 256 MiB")


def test_a_machine_that_does_not_tell(monkeypatch):
    def refuse(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "statvfs", refuse)
    found = named(here.machine())
    assert found["shared memory"].status == "info" and found["shared memory"].value == "not known: no"


# the command, whole


def run(*arguments, launcher=("-m",)):
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "core.training.doctor", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_command_here():
    done = run("--json", "--device", "cpu")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], told["missing"]) == (0, True, []), done.stderr
    found = {row["name"]: row for row in told["checks"]}
    assert len(found) == len(told["checks"]), "every name once"
    tested = [f"self-test {name}" for name in selftest.COLLECTIVES]
    assert all(found[name]["status"] == "ok" and "GB/s" in found[name]["value"] for name in tested)
    assert {
        "Python",
        "torch",
        "device",
        "gloo",
        "attention",
        "fused AdamW",
        "bfloat16",
        "CPU",
        "/dev/shm",
    } <= found.keys()
    assert all(row["remedy"] for row in told["checks"] if row["status"] in ("off", "missing"))


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["lines", "json"])
def test_without_torch_the_packages_are_told(arguments):
    """And without what else a run requires: a traceback would help nobody."""
    blocked = ["torch", "numpy", "einops", "tensorstore", "zarr", "rich", "tyro"]
    code = (
        f"import runpy, sys\nfor name in {blocked}: sys.modules[name] = None\nsys.argv[1:] = {arguments}\n"
        "runpy.run_module('core.training.doctor', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr == ""
    if arguments:
        assert json.loads(done.stdout)["missing"] == blocked[:5]
    else:
        assert "-> pip install 'torch>=2.11'" in done.stdout and "5 required and missing: torch, num" in done.stdout


def test_ranks_that_do_not_come_together(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("wait timeout after 8000ms\nmore")

    monkeypatch.setattr(collect, "launch", refuse)
    monkeypatch.setattr(collect, "collect", lambda device, self_test: [])
    (check,) = collect.collect_here("cpu")
    assert check.required and check.status == "missing" and check.value.endswith(": wait timeout after 8000ms")


@pytest.mark.full
def test_under_torchrun_its_own_ranks_are_tested_and_one_prints():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = run("--json", "--device", "cpu", launcher=launcher)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    values = [row["value"] for row in told["checks"] if row["name"].startswith("self-test ")]
    assert len(values) == 6 and all(value.endswith("GB/s, between 2 ranks on cpu") for value in values)
