"""Weights for other programs, read back by the safetensors library."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from core import dist_checkpointing
from core.dist_checkpointing import ShardedTensor
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.tools.console import progress
from core.dist_checkpointing.tools.export import export, tensors
from core.dist_checkpointing.tools.safetensors_files import _converted
from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.models.gpt.gpt_model import GPTModel
from core.tensor_parallel.embedding import padded_vocab_rows
from core.transformer.transformer_config import TransformerConfig
from tests.dist_checkpointing import whole
from tests.dist_checkpointing.meshes import small_cells


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step-00000007"
    with small_cells():
        return path, whole.save(path)


def opened(folder):
    """name -> tensor, as Hugging Face reads a folder."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(folder / file, "pt") as reader:
            assert reader.metadata() == {"format": "pt"}
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                assert index["weight_map"][name] == file
                found[name] = reader.get_tensor(name)
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert {p.name for p in folder.iterdir()} == {*index["weight_map"].values(), "model.safetensors.index.json"}
    return found


def by_layer(main_parameters, dtype):
    """What is expected: one tensor per layer."""
    made = {}
    for name, tensor in main_parameters.items():
        if name.startswith(whole.LAYERS):
            tail = name.removeprefix(whole.LAYERS)
            made |= {f"{whole.LAYERS}.{i}{tail}": row.to(dtype) for i, row in enumerate(tensor)}
        else:
            made[name] = tensor.to(dtype)
    return made


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        bits = [t.reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize(
    "asked, dtype", [("as-saved", torch.bfloat16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_the_whole_model(saved, tmp_path, capsys, asked, dtype):
    """Weights that are derived: bf16 as the model had them, fp32 the main parameters without rounding."""
    path, main_parameters = saved
    assert main(["export", str(path), str(tmp_path / "out"), "--to", "safetensors", "--dtype", asked]) == 0
    same(opened(tmp_path / "out"), by_layer(main_parameters, dtype))
    assert "20 tensors" in capsys.readouterr().out


def test_a_model_s_own_names_and_shapes(tmp_path, single):
    """What is exported is the state dict, but for the rows that are padding in memory."""
    config = TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=100, max_sequence_length=8, parallel=single)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, tmp_path / "c", ps=single)
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "out")]) == 0
    found, wanted = opened(tmp_path / "out"), model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        true = tensor[:100] if name in ("embedding.word_embeddings.weight", "output_layer.weight") else tensor
        assert torch.equal(found[name], true), name


def test_stored_weights_and_values_that_are_not_floating(tmp_path):
    weights = {"model": {"w": torch.randn(5).bfloat16(), "ids": torch.arange(4), "on": torch.tensor(True)}}
    weights["model"]["small"] = torch.randn(3).to(torch.float8_e4m3fn)
    dist_checkpointing.save(weights, tmp_path / "c")
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "same")]) == 0
    found = opened(tmp_path / "same")
    same(found, weights["model"])
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    found = opened(tmp_path / "wide")
    assert torch.equal(found["w"], weights["model"]["w"].float()) and found["ids"].dtype == torch.int64
    assert torch.equal(found["small"], weights["model"]["small"].float())


def test_other_types_and_names(tmp_path, single):
    """Keys are escaped on disk, not in these files."""
    types = ("uint16", "uint32", "uint64", "complex64")
    state = {f"étape 1.{name}": torch.arange(6).to(getattr(torch, name)) for name in types}
    dist_checkpointing.save({"model": state}, tmp_path / "x", ps=single)
    export(StoredCheckpoint.open(tmp_path / "x"), tmp_path / "hf", None, lambda n: None)
    found = opened(tmp_path / "hf")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    dist_checkpointing.save({"model": {"z": torch.ones(1, dtype=torch.complex128)}}, tmp_path / "y", ps=single)
    with pytest.raises(ValueError, match="z is complex128, which safetensors has no name for"):
        export(StoredCheckpoint.open(tmp_path / "y"), tmp_path / "other", None, lambda n: None)
    assert not (tmp_path / "other").exists()


def test_rounding_is_torch_s():
    bits = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, 3.4e38, 1e-45])])
    ours = torch.from_numpy(_converted(values, "float32", "bfloat16")).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    number = ~torch.isnan(theirs)
    assert torch.equal(ours.view(torch.int16)[number], theirs.view(torch.int16)[number])
    assert torch.isnan(ours[~number]).all()
    back = _converted(ours.view(torch.uint16).numpy(), "bfloat16", "float32")
    assert np.array_equal(back[number], ours.float().numpy()[number])


def test_files_are_cut_and_the_wide_come_first(saved, tmp_path):
    path, main_parameters = saved
    stored = StoredCheckpoint.open(path)
    export(stored, tmp_path / "out", None, lambda done: None, file_bytes=30_000)
    sizes = [p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 33_000
    same(opened(tmp_path / "out"), by_layer(main_parameters, torch.bfloat16))
    mixed = {"model": {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(2, dtype=torch.float64)}}
    dist_checkpointing.save(mixed, tmp_path / "mixed")
    main(["export", str(tmp_path / "mixed"), str(tmp_path / "wide")])
    file = (tmp_path / "wide" / "model-00001-of-00001.safetensors").read_bytes()
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    assert header["b"]["data_offsets"] == [0, 16] and header["a"]["data_offsets"] == [16, 19]


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 2), (4, 3), (1, 4)])
def test_a_directory_for_each_rank(saved, tmp_path, capsys, tp, pp):
    """Parts of all ranks, put together by Megatron's rules, are the whole; layers have global numbers."""
    path, main_parameters = saved
    wanted = by_layer(main_parameters, torch.bfloat16)
    assert main(["reshard", str(path), str(tmp_path / "out"), "--tp", str(tp), "--pp", str(pp), "--per-rank"]) == 0
    names = {f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") for t in range(tp) for p in range(pp)}
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == names
    seen = set()
    for p in range(pp):
        suffix = f"_{p:03d}" if pp > 1 else ""
        ranks = [opened(tmp_path / "out" / f"mp_rank_{t:02d}{suffix}") for t in range(tp)]
        layers = {int(n.split(".")[2]) for n in ranks[0] if n.startswith(whole.LAYERS)}
        assert layers == set(range(4 * p // pp, 4 * (p + 1) // pp))
        assert ("embedding.word_embeddings.weight" in ranks[0]) == (p == 0)
        assert ("output_layer.weight" in ranks[0]) == ("decoder.final_norm.weight" in ranks[0]) == (p == pp - 1)
        for name in ranks[0]:
            stacked = name.startswith(whole.LAYERS)
            key = ".".join([*name.split(".")[:2], *name.split(".")[3:]]) if stacked else name
            dim = whole.TP_DIMS[key]
            parts = [rank[name] for rank in ranks]
            if dim is None:
                assert all(torch.equal(part, wanted[name]) for part in parts)
            else:
                assert torch.equal(torch.cat(parts, dim - stacked), wanted[name])
                if dim == 0:  # a vocabulary: true rows only, cut where the model cuts them
                    rows = padded_vocab_rows(131, tp) // tp
                    assert [len(part) for part in parts] == [min(max(131 - rows * t, 0), rows) for t in range(tp)]
                else:
                    assert len({part.shape for part in parts}) == 1
        seen |= ranks[0].keys()
    assert seen == wanted.keys()


def test_names_of_stacks_that_nobody_told(tmp_path):
    """Keys and offsets in Megatron's own form do not say what the stack is called."""
    rows = torch.randn(3, 4)
    keys = {"model/decoder.layers.norm": "decoder.layers.{}.norm", "model/layers.w": "layers.{}.w"}
    state = {
        key: [ShardedTensor.from_rank_offsets(key, row, (0, i, 3), prepend_axis_num=1) for i, row in enumerate(rows)]
        for key in [*keys, "model/blocks.w"]
    }
    dist_checkpointing.save(state, tmp_path / "c")
    found = {t.name: t.shape for t in tensors(StoredCheckpoint.open(tmp_path / "c"))}
    assert found == {name.format(i): (4,) for name in keys.values() for i in range(3)} | {"blocks.w": (3, 4)}


def test_refused(saved, tmp_path, capsys):
    dist_checkpointing.save({"other": {"w": torch.ones(3)}}, tmp_path / "other")
    assert main(["export", str(tmp_path / "other"), str(tmp_path / "out")]) == 2
    assert "no model" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert main(["export", str(saved[0]), str(tmp_path / "taken")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", str(saved[0]), "memory://x/y"]) == 2
    assert "local directory" in capsys.readouterr().err and not Path("memory:").exists()
    shutil.rmtree(tmp_path / "taken")
    (tmp_path / "taken").mkdir()  # an empty one is fine
    assert main(["export", str(saved[0]), str(tmp_path / "taken")]) == 0


def test_progress_is_shown_on_a_terminal_only(capsys, monkeypatch):
    with progress("x", 100) as done:
        done(100)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress("copying", 1000) as done:
        for _ in range(100):
            done(10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20 and lines[0] == "copying 5 % of 1000 B" and lines[-1].startswith("copying 100 %")
