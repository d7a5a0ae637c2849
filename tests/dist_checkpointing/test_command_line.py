"""`python -m core.dist_checkpointing`: what it says, and its exit codes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core import dist_checkpointing
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from tests.dist_checkpointing import toy, whole
from tests.dist_checkpointing.meshes import small_cells

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps: one weight and the number of the step differ."""
    root = tmp_path_factory.mktemp("root")
    main_parameters = whole.mains()
    dist_checkpointing.save(whole.state(main_parameters, step=7), root / "step-00000007")
    main_parameters["decoder.final_norm.weight"][3] += 1
    dist_checkpointing.save(whole.state(main_parameters, step=8), root / "step-00000008", run={"note": "hello"})
    return root


@pytest.fixture
def root(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "root"))


def said(capsys, *arguments, code=0):
    assert main([str(word) for word in arguments]) == code
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return told.err if code == 2 else told.out


def test_inspect(saved, capsys):
    text = said(capsys, "inspect", saved / "step-00000008")
    assert "cp=1 dp=1 ep=1 pp=1 tp=1" in text and "note hello" in text and "world_size 1" in text
    row = next(line for line in text.splitlines() if "main/decoder.layers.fc2.weight" in line)
    wanted = "optimizer/main/decoder.layers.fc2.weight 4 x 48 x 192 float32 1 4 x 48 x 192 2 147,456"
    assert " ".join(row.split()) == wanted
    nbytes = 2 * 4 * sum(t.numel() for t in whole.mains().values())
    assert f"total: 16 arrays, 16 cells, {nbytes:,} bytes" in text
    assert "model/scale: optimizer/main/scale as bfloat16" in text and "step: 8" in text


def test_inspect_for_programs(saved, capsys):
    told = json.loads(said(capsys, "inspect", "--json", saved / "step-00000007"))
    assert told["objects"] == {"step": 7} and told["format"] == 1 and told["run"]["world_size"] == 1
    assert told["arrays"]["optimizer/main/decoder.layers.fc2.weight"] == {
        "shape": [4, 48, 192],
        "dtype": "float32",
        "cell": [4, 48, 192],
        "cells": 1,
        "bytes": 147456,
        "tp_dim": 2,
        "axis": "tp",
        "stack": "decoder.layers",
        "layers": [0, 1, 2, 3],
    }
    assert told["arrays"]["optimizer/main/scale"]["tp_dim"] is None
    assert told["derived"]["model/scale"] == {"from": "optimizer/main/scale", "torch_dtype": "bfloat16"}
    assert told["bytes"] == sum(array["bytes"] for array in told["arrays"].values())


def test_the_newest_step_of_a_directory(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    told = capsys.readouterr()
    assert "step-00000008" in told.out and "the newest of 2 steps, step-00000008" in told.err


def test_verify(root, capsys):
    at = root / "step-00000007"
    assert "every byte is right" in said(capsys, "verify", at, "-j", 2)
    files = [p for p in at.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files if p.name != "manifest.json")
    assert f"{len(files) - 1} files, {size / 2**10:.1f} KiB, their sizes" in said(capsys, "verify", "--fast", at)
    cell = at / "optimizer" / "main" / "decoder.layers.fc1.weight" / "c.0.0.0"
    data = bytearray(cell.read_bytes())
    data[100] ^= 1
    cell.write_bytes(data)
    (at / "optimizer" / "main" / "scale" / "c").unlink()
    told = said(capsys, "verify", at, code=1)
    assert str(cell) in told and "scale/c: is missing" in told and "2 problems" in told
    assert "1 problems" in said(capsys, "verify", "--fast", at, code=1)  # it reads no values


def test_diff(root, capsys):
    a, b = root / "step-00000007", root / "step-00000008"
    shutil.copytree(a, root / "copy")
    assert said(capsys, "diff", a, root / "copy").startswith("the same: 16 arrays, 1 objects")
    lines = said(capsys, "diff", a, b, code=1).splitlines()
    assert lines == [
        "differs: optimizer/exp_avg/decoder.final_norm.weight: 1 of 1 cells",
        "differs: optimizer/main/decoder.final_norm.weight: 1 of 1 cells",
        "object step: 7 in A, 8 in B",
    ]


def test_diff_of_other_arrays(tmp_path, capsys):
    main_parameters = whole.mains()
    dist_checkpointing.save(whole.state(main_parameters, groups=["model", "optimizer/main"]), tmp_path / "a")
    del main_parameters["scale"]
    dist_checkpointing.save(whole.state(main_parameters, groups=["model"], step=None), tmp_path / "b")
    lines = said(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1).splitlines()
    name = "decoder.final_norm.weight"
    assert f"only in A: optimizer/main/{name}" in lines and "object step: 7 in A, None in B" in lines
    assert f"only in B: model/{name} (the other derives it from optimizer/main/{name})" in lines
    assert len([line for line in lines if "scale" in line]) == 2  # main, and that the weight is derived
    dist_checkpointing.save({"model": {"scale": torch.ones(2)}}, tmp_path / "c")
    dist_checkpointing.save({"model": {"scale": torch.ones(3)}}, tmp_path / "d")
    assert said(capsys, "diff", tmp_path / "c", tmp_path / "d", code=1).splitlines() == [
        "differs: model/scale: float32 of (2,) in A, float32 of (3,) in B"
    ]


def test_diff_reads_values_where_grids_differ(root, capsys):
    at = root / "step-00000008"
    with small_cells():
        main_parameters = whole.mains()
        main_parameters["decoder.final_norm.weight"][3] += 1
        main_parameters[f"{whole.LAYERS}.fc2.weight"][1, 2, 3:5] = -0.0
        main_parameters[f"{whole.LAYERS}.fc2.weight"][1, 2, 5] = float("nan")
        dist_checkpointing.save(whole.state(main_parameters, step=8), root / "other")
    told = said(capsys, "diff", at, root / "other", code=1)
    assert "differs: optimizer/main/decoder.layers.fc2.weight: 3 of 36864 values" in told
    assert "fc1" not in told and "norm" not in told


def test_prune(tmp_path, capsys):
    for step in (10, 20, 30, 40):
        toy.save(CheckpointRoot(tmp_path), step, step)
    told = said(capsys, "prune", tmp_path, "--keep-last", 1, "--keep-every", 20, "--dry-run")
    assert "would remove step-00000010\nwould remove step-00000030\n" in told and "2 would be kept" in told
    assert CheckpointRoot(tmp_path).steps() == [10, 20, 30, 40]
    CheckpointRoot(tmp_path).begin(50, "0" * 32)
    os.utime(tmp_path / f".tmp-step-00000050-{'0' * 32}" / f"{'0' * 32}.heartbeat", (0, 0))
    os.utime(tmp_path / f".tmp-step-00000050-{'0' * 32}", (0, 0))
    told = said(capsys, "prune", tmp_path, "--keep-last", 1, "--keep-every", 20)
    assert "removed step-00000030" in told and "removed .tmp-step-00000050" in told and "2 are kept" in told
    assert CheckpointRoot(tmp_path).steps() == [20, 40] and {p.name for p in tmp_path.iterdir() if p.is_dir()} == {
        "step-00000020",
        "step-00000040",
    }
    assert not (tmp_path / ".lock").exists()


def test_prune_keeps_out_of_a_running_job(tmp_path, capsys):
    for step in (10, 20):
        toy.save(CheckpointRoot(tmp_path), step, step)
    lock = CheckpointRoot(tmp_path).lock()
    try:
        assert "is in use by process" in said(capsys, "prune", tmp_path, "--keep-last", 1, code=2)
    finally:
        lock.release()
    assert CheckpointRoot(tmp_path).steps() == [10, 20]


def test_urls(capsys):
    """An object store that lives in this process; the pointer of a step leads to its files."""
    url = "memory://command-line/runs"
    main_parameters = whole.mains()
    for step in (1, 2):
        dist_checkpointing.save(whole.state(main_parameters, step=step), f"{url}/step-{step:08d}")
    assert "step: 2" in said(capsys, "inspect", url)
    assert "every byte is right" in said(capsys, "verify", f"{url}/step-00000001")
    assert said(capsys, "diff", f"{url}/step-00000001", url, code=1) == "object step: 1 in A, 2 in B\n"
    assert "verified" in said(capsys, "reshard", url, f"{url}/copy", "--tp", 3, "--copy")
    assert "the same" in said(capsys, "diff", url, f"{url}/copy")
    assert "removed step-00000001" in said(capsys, "prune", url, "--keep-last", 1)


def test_errors_are_one_line(root, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (root / "step-00000007" / "manifest.json").write_text("{")
    (root / "step-00000008" / "zarr.json").write_text("{")
    for words, message in (
        (["inspect", tmp_path / "nowhere"], "is no checkpoint"),
        (["verify", tmp_path / "empty"], "is no checkpoint"),
        (["prune", tmp_path / "nowhere", "--keep-last", 1], "holds no steps"),
        (["prune", root, "--keep-last", 0], "at least 1"),
        (["inspect", root / "step-00000007"], "manifest.json"),
        (["diff", root, root], "zarr.json is not the file that was saved"),
        (["export", "nonsense://x", tmp_path / "out"], "nonsense"),
        (["export", root / "step-00000008", "s3://bucket/x"], "zarr.json"),
    ):
        told = said(capsys, *words, code=2).splitlines()
        assert told[-1].startswith("error: ") and message in told[-1], told
        assert len(told) <= 2  # which step was taken
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "out").exists()


def test_a_hugging_face_folder_is_named_with_what_reads_it(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    for command in ("inspect", "verify"):
        told = said(capsys, command, tmp_path, code=2)
        assert told == (
            f"error: {tmp_path} is a Hugging Face folder (it has a config.json), not a checkpoint: a run begins with "
            f"it as --model.huggingface {tmp_path}, python -m core.training.evaluate {tmp_path} --data TEXT and "
            f"python -m core.training.generate {tmp_path} --prompt TEXT read it, python -m core.models.huggingface "
            f"import {tmp_path} CKPT makes a checkpoint of it\n"
        )


def test_none_of_it_needs_torch(root, tmp_path):
    code = "import sys; sys.modules['torch'] = None; from core.dist_checkpointing.__main__ import main; "
    code += "import shlex; [print(main(shlex.split(line))) for line in sys.stdin.read().splitlines()]"
    commands = [f"inspect {root}", f"verify {root}", f"diff {root} {root}", f"prune {root} --keep-last 1"]
    commands += [f"export {root} {tmp_path}/out", f"reshard {root} {tmp_path}/new --tp 3 --copy"]
    commands += [f"reshard {root} {tmp_path}/ranks --tp 2 --per-rank"]
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(commands), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line for line in done.stdout.splitlines() if len(line) == 1] == ["0"] * 7, done.stdout + done.stderr


def test_it_is_a_program(saved):
    done = subprocess.run(
        [sys.executable, "-m", "core.dist_checkpointing", "verify", str(saved)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "every byte is right" in done.stdout
