"""The house has floors (docs: CONTRIBUTING.md): a room imports only from floors below, or from itself."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"parallel_state", "autograd", "testing"},
    {"tensor_parallel", "context_parallel", "pipeline", "data_parallel", "dist_checkpointing", "datasets"},
    {"transformer", "optimizer"},
    {"models", "planner"},
    {"training"},
    {"interop"},
    {"pretrain"},  # core/pretrain.py, the roof
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted((ROOT / "core").rglob("*.py"))
COLLECTIVES = ROOT / "core" / "parallel_state" / "collectives"
# pure packages and modules: importable, and usable, on a machine without torch
WITHOUT_TORCH = [
    "core",
    "core.__main__",
    "core.extras",
    "core.datasets.inspect",
    "core.datasets.prepare",  # and with it all that it does for bytes
    "core.dist_checkpointing.planning.plan",  # and with it arrays, grid
    "core.parallel_state",
    "core.parallel_state.config",
    "core.parallel_state.flat",
    "core.parallel_state.grid",
    "core.dist_checkpointing.__main__",  # and with it all that its commands need
    "core.dist_checkpointing.publish.commit",  # and with it check, root, lock, place, manifest, fs
    "core.dist_checkpointing.format.digest",
    "core.dist_checkpointing.format.zarr_metadata",
    "core.dist_checkpointing.storage.zarr_store",
    "core.pipeline",
    "core.pipeline.search.search",
    "core.pipeline.simulate",  # and with it actions, timeline, player, passes, schedules, torch_csv, draw
    "core.training.doctor.packages",  # and with it what the report says where torch is missing
]


@cache
def imports(path):
    """Every absolute module name that the file imports, TYPE_CHECKING blocks included."""
    return tuple(_imports(path))


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path):
    parts = path.relative_to(ROOT / "core").parts
    room = parts[0].removesuffix(".py")
    return room if len(parts) > 1 or room in FLOOR else None


def test_every_room_has_a_floor():
    assert {room for path in FILES if (room := room_of(path))} <= FLOOR.keys()


def test_imports_only_point_down():
    wrong = []
    for path in FILES:
        room = room_of(path)
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("core.") else None
            if other and other in FLOOR and other != room and (room is None or FLOOR[other] >= FLOOR[room]):
                wrong.append(f"{path.relative_to(ROOT)} (floor {FLOOR.get(room)}) imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles_between_files():
    def module(path):
        parts = path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    names = {module(path) for path in FILES}
    graph = {}
    for path in FILES:
        found = set()
        for name in imports(path):
            while name and name not in names:
                name = name.rpartition(".")[0]
            found.add(name)
        graph[module(path)] = found - {"", "core", module(path)}
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"import cycle among {sorted(graph)}"


def test_only_collectives_talks_to_torch_distributed():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in imports(path)
        if name.startswith("torch.distributed") and COLLECTIVES not in path.parents
    ]
    assert not wrong, "\n".join(wrong)


def test_no_device_literals():
    wrong = [str(path.relative_to(ROOT)) for path in FILES if "torch.cuda" in path.read_text()]
    assert not wrong, f"use torch.accelerator in {wrong}"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_import_without_torch(name):
    code = f"import sys; sys.modules['torch'] = None; import {name}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
