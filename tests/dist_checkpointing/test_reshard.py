"""Offline copies for another layout: the same values, normal checkpoints, bounded memory."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from core import dist_checkpointing
from core.dist_checkpointing import ShardedTensor
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.format import grid
from tests.dist_checkpointing import whole
from tests.dist_checkpointing.meshes import small_cells

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step-00000007"
    with small_cells():
        main_parameters = whole.save(path)
    return path, main_parameters


@pytest.fixture(autouse=True)
def _small_cells():
    with small_cells():
        yield


def files(path):
    """The files that are the same whoever wrote them."""
    every = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    return {name: data for name, data in every.items() if name != "manifest.json" and "receipts" not in name}


@pytest.mark.parametrize("layout", [["--tp", "2"], ["--tp", "4"], ["--tp", "8"], ["--tp", "4", "--pp", "2"]])
def test_nothing_needs_to_move(saved, tmp_path, capsys, layout):
    assert main(["reshard", str(saved[0]), str(tmp_path / "new"), *layout]) == 0
    said = capsys.readouterr().out
    assert "no data movement needed" in said and f"tp={layout[1]}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tp", [3, pytest.param(12, marks=pytest.mark.full)])
def test_a_copy_for_other_sizes_and_back_again(saved, tmp_path, capsys, tp):
    path, main_parameters = saved
    assert main(["reshard", str(path), str(tmp_path / "new"), "--tp", str(tp)]) == 0
    assert files(tmp_path / "new") != files(path)
    group = zarr.open_group(tmp_path / "new", mode="r")
    for name, tensor in main_parameters.items():
        assert np.array_equal(group[f"optimizer/main/{name}"][...], tensor.numpy())
    assert main(["verify", str(tmp_path / "new")]) == 0
    assert main(["diff", str(path), str(tmp_path / "new")]) == 0, capsys.readouterr().out
    assert main(["reshard", str(tmp_path / "new"), str(tmp_path / "back"), "--tp", "8", "--copy"]) == 0
    assert files(tmp_path / "back") == files(path)


def test_a_copy_reads_less(saved, tmp_path, capsys):
    main(["reshard", str(saved[0]), str(tmp_path / "new"), "--tp", "3"])
    found = re.search(
        r"verified; tp=3 pp=1 reads ([\d.]+) times the bytes it needs, ([\d.]+) before", capsys.readouterr().out
    )
    assert float(found[1]) < 1.05 < float(found[2])
    assert main(["reshard", str(tmp_path / "new"), str(tmp_path / "again"), "--tp", "3"]) == 0
    assert "no data movement needed" in capsys.readouterr().out and not (tmp_path / "again").exists()


def test_a_copy_is_a_normal_checkpoint(saved, tmp_path):
    """Weights, which are derived, read at tp=3 by ranks of another kind than those that saved; and the step."""
    path, main_parameters = saved
    main(["reshard", str(path), str(tmp_path / "new"), "--tp", "3", "--pp", "2"])
    name = f"{whole.LAYERS}.fc2.weight"
    for rank in range(3):
        local = torch.zeros(48, 64, dtype=torch.bfloat16)
        part = ShardedTensor(f"model/{name}", local, (4, 48, 192), (2, 0, 64 * rank), prepend_axis_num=1, tp_dim=2)
        state = dist_checkpointing.load({"w": part, "step": 0}, tmp_path / "new", strict=False)
        assert torch.equal(local, main_parameters[name][2, :, 64 * rank : 64 * rank + 64].bfloat16())
        assert state["step"] == 7
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["run"]["resharded"] == {"tp": 3, "pp": 2}


def test_what_is_too_small_to_be_cut_is_not_copied_in_vain(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid, "MIN", 2**18)
    monkeypatch.setattr(grid, "MAX", 2**22)
    whole.save(tmp_path / "toy", groups=["model"])
    assert main(["reshard", str(tmp_path / "toy"), str(tmp_path / "new"), "--tp", "3"]) == 0
    assert "a copy would not better" in capsys.readouterr().out and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "layout, message",
    [(["--tp", "5"], "tp=5 does not divide"), (["--tp", "3", "--pp", "5"], "pp=5"), (["--tp", "0"], "at least 1")],
)
def test_refused(saved, tmp_path, capsys, layout, message):
    assert main(["reshard", str(saved[0]), str(tmp_path / "new"), *layout]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_destination_that_is_taken(saved, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    shutil.copytree(saved[0], tmp_path / "checkpoint")
    for name in ("mine", "checkpoint"):
        for how in ([], ["--per-rank"]):
            assert main(["reshard", str(saved[0]), str(tmp_path / name), "--tp", "3", *how]) == 2
            assert "error: " in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "mine"]
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("how", ["flip", "swap", "delete"])
def test_a_damaged_source_is_named_and_nothing_is_left(saved, tmp_path, capsys, how):
    source = tmp_path / "source"
    shutil.copytree(saved[0], source)
    folder = source / "optimizer" / "main" / f"{whole.LAYERS}.fc1.weight"
    one, other = sorted(p for p in folder.iterdir() if p.name != "zarr.json")[:2]
    if how == "swap":
        one.rename(folder / "x")
        other.rename(one)
        (folder / "x").rename(other)
    elif how == "delete":
        one.unlink()
    else:
        data = bytearray(one.read_bytes())
        data[10] ^= 1
        one.write_bytes(data)
    for command in (["reshard", "--tp", "3"], ["reshard", "--tp", "3", "--per-rank"], ["export"]):
        assert main([command[0], str(source), str(tmp_path / "new" / "deep"), *command[1:]]) == 2
        said = capsys.readouterr().err
        assert one.name in said or other.name in said
        assert not list((tmp_path / "new").iterdir())


def peak_mib(path, layers, tmp_path):
    """(size of a checkpoint of h 1536 in MiB, peak memory of the process that copies it for tp=3)."""
    script = f"""
import torch
from tests.dist_checkpointing import whole
torch.set_num_threads(1)
whole.save({str(path)!r}, sizes={{"hidden": 1536, "layers": {layers}}})
"""
    command = [
        sys.executable,
        "-m",
        "core.dist_checkpointing",
        "reshard",
        str(path),
        str(tmp_path / "copy"),
        "--tp",
        "3",
    ]
    measure = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10); sys.exit(done.returncode)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=env)
    done = subprocess.run(
        [sys.executable, "-c", measure, *command], check=True, env=env, capture_output=True, text=True
    )
    assert "verified" in done.stdout
    size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) >> 20
    shutil.rmtree(tmp_path / "copy")
    shutil.rmtree(path)
    return size, int(done.stdout.split()[-1])


@pytest.mark.full
def test_memory_is_bounded_and_flat(tmp_path):
    """Not under small cells: other processes."""
    small, large = peak_mib(tmp_path / "small", 1, tmp_path), peak_mib(tmp_path / "large", 6, tmp_path)
    print(f"copied {small[0]} MiB in {small[1]} MiB, {large[0]} MiB in {large[1]} MiB")
    assert large[0] >= 1024 and large[1] <= large[0] / 4
    assert large[1] <= small[1] + 48
