"""`python -m core.dist_checkpointing import`: what torch's DCP and Megatron wrote, read under any layout here."""

import argparse
import sys
import weakref
from enum import Enum

import pytest
import torch

from core.dist_checkpointing import (
    Source,
    lazy_tensors,
    load,
    load_common_state_dict,
    load_plain_tensors,
    save,
)
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.tools.foreign import dcp_shards
from core.dist_checkpointing.writing.job import Job
from core.models.gpt import GPTModel, llama_spec
from core.training.run.facts import model_of_checkpoint
from core.transformer import TransformerConfig
from tests.dist_checkpointing import dcp_files
from tests.dist_checkpointing.dcp_files import VALUE, rows, tiles, whole
from tests.dist_checkpointing.meshes import small_cells
from tests.dist_checkpointing.test_dtensor import fully_sharded, module
from tests.dist_checkpointing.test_leftovers import aged
from tests.states import state as parallel


def stepped(model):
    """An optimizer that has made two steps; the same on every rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for number in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * (number + 0.5)
        optimizer.step()
    return optimizer


def save_fsdp(path, tp):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.set_default_dtype(torch.float32)  # of an optimizer's counts; the pool sets its own again
    model = fully_sharded(1, parallel(tp=tp))
    weights, states = get_state_dict(model, stepped(model))
    state = {"model": weights, "optim": states, "step": 7, "when": {"rate": float("inf"), "size": (1, 2)}}
    state["odd"] = {"set": {1}, "list": [torch.arange(3), 5], "empty": torch.empty(0, 2)}
    dcp.save(state, checkpoint_id=path)
    full = [
        [t.full_tensor() for t in kinds.values() if hasattr(t, "full_tensor")] for kinds in states["state"].values()
    ]
    return {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in weights.items()}, full


def load_fsdp(path):
    ps = parallel()
    model, expected = fully_sharded(2, ps), fully_sharded(1, ps)
    stepped(expected)
    load({"model": model.state_dict()}, path, ps=ps)
    for name, value in model.state_dict().items():
        pair = [t.to_local() if hasattr(t, "to_local") else t for t in (value, expected.state_dict()[name])]
        assert torch.equal(*pair), name


def moments(key):
    """Where DCP keeps what an optimizer here asks for."""
    group, kind, name = key.split("/") if key.startswith("adam/") else ("", "", "")
    return f"optim/state/{name}/{kind}" if group and kind != "param_groups" else key


@pytest.mark.full
@pytest.mark.parametrize("world, tp", [(2, 1), (4, 2)])
def test_fsdp2_and_its_optimizer(ranks, tmp_path, single, capsys, world, tp):
    """Saved by all ranks, over tensor parallelism or not; loaded by one into plain modules, and by two."""
    (weights, states), *_ = ranks(save_fsdp, str(tmp_path / "dcp"), tp, world=world)
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("left out: odd/empty: a tensor of shape [0, 2] has no elements")
    assert told[1].startswith("left out: odd/set: set cannot be saved") and "2 left out" in told[2]
    assert main(["verify", str(tmp_path / "ours")]) == 0
    plain = module(2)
    optimizer = torch.optim.AdamW(plain.parameters())
    state = {"model": plain.state_dict(), "adam": optimizer}
    load(state, tmp_path / "ours", ps=single, mapping=moments, strict=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for parameter, kinds in zip(plain.parameters(), states, strict=True):
        found = [t for name, t in optimizer.state[parameter].items() if name != "step"]
        assert len(found) == len(kinds) == 2 and all(map(torch.equal, found, kinds))
        assert optimizer.state[parameter]["step"] == 2
    values = load_common_state_dict(tmp_path / "ours")
    assert values["step"] == 7 and values["when/rate"] == float("inf") and values["when/size"] == (1, 2)
    assert values["optim/param_groups"][0]["lr"] == 0.25 and values["odd/list/1"] == 5
    assert lazy_tensors(tmp_path / "ours")["odd/list/0"][...].tolist() == [0, 1, 2]
    ranks(load_fsdp, str(tmp_path / "ours"), world=2)
    same_names(tmp_path / "ours", single, states)


def same_names(path, ps, states):
    """The state dict that was saved loads, nothing missing and nothing left; torch sets it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    plain = module(2)
    optimizer = stepped(plain)
    state = load(dict(zip(("model", "optim"), get_state_dict(plain, optimizer), strict=True)), path, ps=ps)
    state["optim"]["param_groups"][0]["eps"] = 1e-3
    set_state_dict(plain, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for parameter, kinds in zip(plain.parameters(), states, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], kinds[0])
    assert optimizer.param_groups[0]["lr"] == 0.25 and optimizer.param_groups[0]["eps"] == 1e-3


CONFIG = {"num_layers": 2, "hidden_size": 12, "num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 20}
CONFIG |= {"normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True, "add_bias_linear": False}
VOCAB = 51


def gpt(ps):
    config = TransformerConfig(**CONFIG, params_dtype=torch.float32)
    return GPTModel(config, llama_spec(), VOCAB, 8, parallel=ps)


def as_megatron(key):
    """Its names, and its shapes: heads, gate and up in one dim, padded rows of the vocabulary."""
    name = key.removeprefix("model/").replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if name.endswith("linear_qkv.weight"):
        return Source(name, shape=(2, 2, 5, 2, 12))
    if name.endswith("linear_fc1.weight"):
        return Source(name, shape=(2, 2, 20, 12))
    return Source(name)[:VOCAB] if "embedding" in name or "output_layer" in name else name


def rows_of_vocabulary(key):
    return Source(key)[:VOCAB] if "embedding" in key or "output_layer" in key else key


def load_gpt(path, expected, tp, mapping=as_megatron):
    ps = parallel(tp=tp)
    state = gpt(ps).sharded_state_dict()
    load({"model": state}, path, ps=ps, mapping=mapping)
    for part in state.values():
        assert torch.equal(part.stacked_data, expected[part.key][tuple(slice(*cut) for cut in part.box)]), part.key


def test_megatrons_torch_dist(ranks, tmp_path, single, capsys):
    """Layers in one array, a piece for each of two tensor ranks, gate and up apart in it."""
    expected, tensors = {}, {}
    for part in gpt(single).sharded_state_dict().values():
        expected.setdefault(part.key, torch.randn(part.global_shape))
    for key, value in expected.items():
        form = as_megatron(key)
        name = getattr(form, "key", form)
        if form == Source(name)[:VOCAB]:
            value = torch.cat([value, torch.zeros(64 - VOCAB, 12)])
        elif isinstance(form, Source):
            value = value.reshape(2, -1, 12)
        dim = next((d for d, n in enumerate(value.shape) if d and n > 12), 0)
        cut = 4 if name.endswith("fc1.weight") else 2
        edges = [range(0, n + 1) if d == 0 and "layers" in name else (0, n) for d, n in enumerate(value.shape)]
        edges[dim] = range(0, value.shape[dim] + 1, value.shape[dim] // cut) if dim else edges[dim]
        tensors[name] = (value, tiles(*edges))
    extra = {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{i}_2": [None] for i in range(2)}
    common = {"iteration": 9, "rng": {"state": torch.arange(5, dtype=torch.uint8)}}
    dcp_files.megatron(tmp_path / "iter_9", tensors, extra, common=common)
    assert main(["import", str(tmp_path / "iter_9"), str(tmp_path / "ours")]) == 0
    assert "3 values, 0 left out" in capsys.readouterr().out
    assert load_common_state_dict(tmp_path / "ours")["iteration"] == 9
    assert lazy_tensors(tmp_path / "ours")["rng/state"][1:].tolist() == [1, 2, 3, 4]
    for tp in (1, 2):
        ranks(load_gpt, str(tmp_path / "ours"), expected, tp, world=tp)
    # with Megatron's arguments names and shapes are those of a GPTModel, and the manifest says which one
    arguments = {name: CONFIG[name] for name in list(CONFIG)[:6]} | {"group_query_attention": True, "swiglu": True}
    arguments |= {"add_bias_linear": False, "untie_embeddings_and_output_weights": True, "seq_length": 8}
    arguments |= {"position_embedding_type": "rope", "padded_vocab_size": 64}
    tensors["optimizer.state.exp_avg.output_layer.weight"] = (torch.ones(64, 12), whole(torch.ones(64, 12)))
    args = argparse.Namespace(**arguments)
    dcp_files.megatron(tmp_path / "iter_10", tensors, extra, common=common | {"args": args})
    assert main(["import", str(tmp_path / "iter_10"), str(tmp_path / "known")]) == 0
    assert "mapping" not in capsys.readouterr().out
    for tp in (1, 2):
        ranks(load_gpt, str(tmp_path / "known"), expected, tp, rows_of_vocabulary, world=tp)
    made = model_of_checkpoint(tmp_path / "known")
    assert made["vocab_size"] == 64 and made["config"].num_query_groups == 2
    model = GPTModel(**made)
    load({"model": model.sharded_state_dict()}, tmp_path / "known")
    assert load_common_state_dict(tmp_path / "known")["megatron/args/swiglu"] is True
    # a part that is no GPTModel's: all stays as it lies, and the reason is told
    tensors["decoder.layers.mlp.router.other"] = (torch.ones(2, 3), whole(torch.ones(2, 3)))
    tensors["decoder.layers.odd.weight"] = (torch.ones(2, 3), whole(torch.ones(2, 3)))
    dcp_files.megatron(tmp_path / "iter_11", tensors, extra, common=common | {"args": args})
    assert main(["import", str(tmp_path / "iter_11"), str(tmp_path / "odd")]) == 0
    assert (
        "layers.odd.weight: its place in a GPTModel is not known; load it with a mapping" in capsys.readouterr().out
    )
    assert "decoder.layers.odd.weight" in lazy_tensors(tmp_path / "odd")


def test_what_megatron_keeps_beside_and_is_not_safe_is_told(tmp_path, capsys):
    value = torch.arange(4.0)
    common = {"args": argparse.Namespace(lr=1)}
    dcp_files.megatron(tmp_path / "a", {"w": (value, whole(value))}, common=common)
    assert main(["import", str(tmp_path / "a"), str(tmp_path / "ours")]) == 0
    told = capsys.readouterr().out
    assert "left out: common.pt: " in told and "argparse.Namespace" in told
    assert "nothing is said of the model: common.pt holds no args of Megatron's; load it with a mapping" in told
    dcp_files.megatron(tmp_path / "b", {"w": (value, whole(value))}, common={}, backend="zarr")
    assert main(["import", str(tmp_path / "b"), str(tmp_path / "other")]) == 2
    assert "is Megatron's 'zarr'; only torch_dist is read" in capsys.readouterr().err
    for text in ("[]", "no JSON"):  # another program's
        (tmp_path / "b" / "metadata.json").write_text(text)
        assert main(["import", str(tmp_path / "b"), f"memory://{tmp_path}/{len(text)}"]) == 0
        assert load_plain_tensors(f"memory://{tmp_path}/{len(text)}")["w"].tolist() == [0, 1, 2, 3]


def test_every_dtype_and_any_pieces(tmp_path):
    """Bits, NaNs with payloads among them; pieces that cross cells in both dims."""
    bits = torch.randint(256, (24 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    dtypes = ("float64", "bfloat16", "float16", "float8_e4m3fn", "int16", "uint32", "complex64")
    tensors = {}
    for name in dtypes:
        value = bits.view(getattr(torch, name)).view(8, -1)
        n = value.shape[1]
        tensors[name] = (value, tiles((0, 3, 8), (0, 1, n // 2, n)))
    tensors["flag"] = (torch.tensor(True), [()])
    tensors["big"] = (torch.arange(3000.0).view(60, 50), tiles((0, 1, 41, 60), (0, 33, 50)))
    dcp_files.write(tmp_path / "dcp", tensors)
    with small_cells():
        assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 0
    found = lazy_tensors(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, (value, _) in tensors.items():
        again = found[name][...]
        assert again.dtype == value.dtype and again.shape == value.shape
        assert torch.equal(again.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def test_enumerations_as_the_first_pythons_3_11_write_them(tmp_path, monkeypatch):
    """By getattr(class, name); later ones by class(value)."""
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name)))
    dcp_files.write(tmp_path / "dcp", {"w": (VALUE, whole(VALUE))})
    assert b"getattr" in (tmp_path / "dcp/.metadata").read_bytes()
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 0
    assert torch.equal(lazy_tensors(tmp_path / "ours")["w"][...], VALUE)


def test_memory_is_that_of_a_few_pieces(tmp_path, monkeypatch):
    """Of 6 MiB in pieces of 64 KiB no more than 256 KiB and one piece are held at any moment."""
    value = torch.arange(3 << 18, dtype=torch.float64).view(3 << 8, 1 << 10)
    edges = [*range(0, 769, 8)]
    dcp_files.write(tmp_path / "dcp", {"a": (value, tiles(edges, (0, 1024))), "b": (value, whole(value)[:1])})
    alive, most, real = weakref.WeakSet(), [0], torch.load

    def counted(*arguments, **options):
        found = real(*arguments, **options)
        alive.add(found)
        most.append(sum(t.nbytes for t in alive if t.nbytes < 1 << 20))
        return found

    monkeypatch.setattr(torch, "load", counted)
    monkeypatch.setattr(dcp_shards, "CACHE_BYTES", 1 << 18)
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "ours")]) == 0
    assert len(most) - 1 == len(edges)  # each piece once: those of "a", and the one of "b"
    assert 64 << 10 <= max(most) <= (1 << 18) + (64 << 10)
    assert all(torch.equal(lazy_tensors(tmp_path / "ours")[name][...], value) for name in "ab")


def test_names(tmp_path, single, capsys):
    """Of nested dicts, as DCP flattened them; characters that no path has; two that are one."""
    nested = {"a.b": ("a", "b"), "c": ("étape 1", 0)}
    folder = dcp_files.write(
        tmp_path / "dcp", {"a.b": (VALUE, whole(VALUE)), "c": (VALUE, whole(VALUE))}, nested=nested
    )
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    target = {"a": {"b": torch.zeros(3, 4)}, "étape 1": [torch.zeros(3, 4)]}
    load(target, tmp_path / "ours", ps=single)
    assert torch.equal(target["a"]["b"], VALUE) and torch.equal(target["étape 1"][0], VALUE)
    for number, (names, said) in enumerate(
        ((("a", "b"), "lies inside the array 'a'"), (("a",), "two entries would be called a"), (("..",), "no path"))
    ):
        tensors = {"x": (VALUE, whole(VALUE)), "y": (VALUE, whole(VALUE))}
        folder = dcp_files.write(tmp_path / str(number), tensors, nested={"x": names, "y": ("a",)})
        assert main(["import", str(folder), str(tmp_path / "other")]) == 2
        assert said.replace("no path", "cannot be a path") in capsys.readouterr().err


def test_lists_are_one_value_again(tmp_path, single):
    """As a save here has them: those with tensors apart, others whole, unless something in them is left out."""
    state = {
        "groups": [{"lr": 0.5, "on": [1, {"x": None}]}, {"lr": 2}],
        "mixed": [VALUE, [1, {"y": 2}]],
        "odd": [3, {4}],
    }
    tensors, values, nested = {}, {}, {}

    def flatten(path, leaf):
        if isinstance(leaf, dict | list):
            for name, item in leaf.items() if isinstance(leaf, dict) else enumerate(leaf):
                flatten((*path, name), item)
            return
        name = ".".join(map(str, path))
        nested[name] = path
        if isinstance(leaf, torch.Tensor):
            tensors[name] = (leaf, whole(leaf))
        else:
            values[name] = leaf

    flatten((), state)
    folder = dcp_files.write(tmp_path / "dcp", tensors, values, nested=nested)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert load_common_state_dict(tmp_path / "ours") == {
        "groups": state["groups"],
        "mixed/1": [1, {"y": 2}],
        "odd/0": 3,
    }
    del state["odd"]
    assert load({**state, "groups": None}, tmp_path / "ours", ps=single)["groups"] == state["groups"]


def test_what_is_there_stays(tmp_path, single, capsys):
    folder = dcp_files.write(tmp_path / "dcp", rows((0, 3)))
    save({"x": 1}, tmp_path / "ours", ps=single)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for name, said in (("ours", "is a checkpoint already"), ("mine", "holds 1 entries (file) and is no checkpoint")):
        assert main(["import", str(folder), str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
    assert load_common_state_dict(tmp_path / "ours") == {"x": 1} and (tmp_path / "mine" / "file").exists()
    (tmp_path / "run").mkdir()
    folder.rename(tmp_path / "run" / "iter_2")
    for source, said in (
        ("run", "but 1 directories in it have: give iter_2"),
        ("none", "is no directory of torch's DCP"),
        ("ours", "is no directory of torch's DCP"),
    ):
        assert main(["import", str(tmp_path / source), str(tmp_path / "new")]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["import", "gs://x/y", str(tmp_path / "new")]) == 2
    assert "only local directories are imported" in capsys.readouterr().err


def test_what_is_interrupted_is_gone_and_what_is_killed_is_swept(tmp_path, single, capsys, monkeypatch):
    folder, top = dcp_files.write(tmp_path / "dcp", rows((0, 1), (1, 3))), tmp_path / "top"

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(dcp_shards, "load_saved", interrupt)
    assert main(["import", str(folder), str(top / "a")]) == 2
    assert "interrupted" in capsys.readouterr().err and not list(top.iterdir())
    monkeypatch.setattr(Job, "abandon", lambda job: None)
    assert main(["import", str(folder), str(top / "a")]) == 2
    monkeypatch.undo()
    assert [path.name[:7] for path in top.iterdir()] == [".tmp-a-"]
    aged(top)
    assert main(["import", str(folder), str(top / "b")]) == 0
    assert [path.name for path in top.iterdir()] == ["b"]


def test_without_torch(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "core.dist_checkpointing.tools.importing", None)
    assert main(["import", str(tmp_path), str(tmp_path / "x")]) == 2
    assert "install torch" in capsys.readouterr().err
