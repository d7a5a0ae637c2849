"""Whatever a state dict holds comes back as it was, or is refused before anything is written."""

import hashlib
import json
import math
from collections import OrderedDict, namedtuple
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from core.dist_checkpointing import load, load_common_state_dict, load_plain_tensors, load_tensors_metadata, register
from core.dist_checkpointing.format.keys import key_of, path_of
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.catalog import flatten
from core.dist_checkpointing.state.leaves import decode, encode
from core.dist_checkpointing.state.nested import map_leaves
from core.dist_checkpointing.writing.saving import Saver
from tests.dist_checkpointing import small
from tests.states import state as parallel

Pair = namedtuple("Pair", "first second")


class Rate:
    def __init__(self, value, parts=()):
        self.value, self.parts = value, parts

    def __eq__(self, other):
        return (self.value, self.parts) == (other.value, other.parts)


@pytest.fixture
def rates():
    register(Rate, lambda r: {"value": r.value, "parts": r.parts}, lambda content: Rate(**content))


def saved(state, folder, ps):
    Saver(str(folder), ps, durable=False).save("x", state)
    return folder / "x"


def emptied(path, leaf):
    """A template of the same tensors, with other values."""
    if isinstance(leaf, torch.Tensor):
        return torch.zeros_like(leaf)
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else None


def same(a, b):
    """Of one type and value, inside too; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


VALUES = {
    "tuples": (1, (2.5, [3, ()], {"deep": (None,)})),
    "best_loss": math.inf,
    "worst": -math.inf,
    "nothing": [math.nan, {"a": math.nan}],
    "complex": [1 - 2j, complex(math.inf, 0.5)],
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "numbers as keys": [{1: "a", "1": "b", (2, 3): "c"}],
    "the tag itself": [{"$type": "tuple", "value": [1]}],
    "numpy": [np.float32(0.1), np.float64(0.1), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j)],
    "long": 2**100,
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    """Through JSON as it is on disk."""
    assert same(decode(json.loads(json.dumps(encode(VALUES[name]), allow_nan=False))), VALUES[name])


TENSORS = {
    **{
        name: (torch.arange(-3, 9) * 1000).to(getattr(torch, name)).view(3, 4)
        for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool")
    },
    "complex64": torch.randn(3, 2, dtype=torch.complex64),
    "complex128": torch.randn(3, 2, dtype=torch.complex128).T,
    "scalar": torch.tensor(1 + 2j, dtype=torch.complex128),
}
ARRAYS = {
    **{name: t.numpy() for name, t in TENSORS.items()},
    "float16": np.float16([1.5, math.nan]),
    "read-only": np.broadcast_to(np.float32(3), (2, 2)),
    "backwards": np.arange(5)[::-1],
    "big endian": np.arange(5, dtype=">i4"),
    "no dims": np.array(2.5),
}


def test_whole_states(tmp_path, single, rates):
    state = {
        "tensors": TENSORS,
        "arrays": ARRAYS,
        "lists": [torch.ones(2), {"of": torch.zeros(1), "many": (1, "kinds")}, [], (torch.ones(1).int(),)],
        "random": np.random.RandomState(3).get_state(),
        "named": Pair(torch.ones(2), (1, 2)),
        "values": VALUES,
        "mine": [Rate(math.inf, (1, 2)), Rate(b"x")],
        "étape 1": {
            "a b, c=1@2": torch.ones(3),
            "__x": torch.ones(1),
            "100%": 1,
            "~": (torch.ones(1),),
            "%41": torch.ones(1),
        },
        "a/b": torch.ones(1),
        7: {None: 1, 2.5: torch.ones(1), True: "x"},
    }
    place = saved(state, tmp_path, single)
    back = load(map_leaves(state, emptied), place, ps=single)
    native = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in ARRAYS.items()}
    assert same(back, state | {"arrays": native})
    assert load_common_state_dict(place)["étape 1/100%"] == 1
    keys = load_tensors_metadata(place).keys()
    assert {"étape 1/a b, c=1@2", "étape 1/__x", "étape 1/%41", "étape 1/~/0", "lists/1/of", "7/2.5"} <= keys
    assert load_plain_tensors(place, keys="étape 1/*, c*").keys() == {"étape 1/a b, c=1@2"}
    group = zarr.open_group(place, mode="r")
    assert np.array_equal(group["tensors/complex128"][:], TENSORS["complex128"].numpy())
    assert np.array_equal(group["%C3%A9tape%201/a%20b%2C%20c%3D1%402"][:], np.ones(3))


def test_numpys_arrays_are_filled_in_place(tmp_path, single):
    place = saved({"w": np.arange(6.0).reshape(2, 3)}, tmp_path, single)
    target = np.zeros((4, 3))[::2]
    assert load({"w": target}, place, ps=single)["w"] is target and target[1].tolist() == [3, 4, 5]
    kept = np.broadcast_to(0.0, (2, 3))
    assert load({"w": kept}, place, ps=single)["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and not kept.any()


WRONG = {
    "a module": ({"x": torch.nn.Linear(2, 2)}, r"x: a Linear is no state; give .*sharded_state_dict\(module, ps\)"),
    "a set": ({"x": {1}}, r"x: set cannot be saved; give .*register\(set, to_json, from_json\)"),
    "a named tuple of values": ({"x": [Pair(1, 2)]}, r"x: Pair cannot be saved; .*register"),
    "an unknown type": ({"x": {"y": Fraction(1, 2)}}, r"x/y: Fraction cannot be saved; .*register\(Fraction,"),
    "a function": ({"x": len}, "x: builtin_function_or_method cannot be saved"),
    "a date": ({"x": np.datetime64("2020-01-01")}, "x: numpy.datetime64"),
    "objects": ({"x": np.array([None])}, "x: a numpy array of object has no stored form"),
    "texts": ({"x": np.array(["a"])}, "x: a numpy array of <U1 has no stored form"),
    "a masked array": ({"x": np.ma.ones(2)}, "x: a MaskedArray is more than its numbers"),
    "a conjugate": ({"x": torch.ones(2, dtype=torch.complex64).conj()}, r"x is a conjugate .*resolve_conj\(\)"),
    "meta": ({"x": torch.ones(2, device="meta")}, "x is on the meta device"),
    "an empty name": ({"x": {"": torch.ones(1)}}, "the key 'x/' cannot be a path"),
    "an object as a name": ({"x": {Pair: 1}}, "x: the key <class .*Pair.* is a type; use texts or numbers"),
    "names written alike": ({"x": {1: 1, "1": 2}}, "x: the keys 1 and '1' are written alike"),
    "one name twice": ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "a/b is two tensors"),
    "a tensor and a value": ({"é": {"b": torch.ones(1)}, "é/b": 1}, "é/b is both a tensor and a value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_kept(name):
    state, told = WRONG[name]
    with pytest.raises(ValueError, match=told):
        flatten(state)


def test_a_value_within_itself():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="is nested too deeply, or holds itself"):
        flatten({"x": endless})


def prepare_wrong(root):
    """One rank's state cannot be kept: all hear it before anything is there."""
    ps = parallel(tp=2)
    for state, told in WRONG.values():
        with pytest.raises(ValueError, match=told):
            Saver(root, ps, durable=False).prepare(state if ps.rank else {"x": 1})
    assert not list(Path(root).iterdir())


def test_all_ranks_hear_of_it_at_prepare(ranks, tmp_path):
    ranks(prepare_wrong, str(tmp_path), world=2)


def test_a_function_that_fails_while_loading(tmp_path, single):
    """Nothing is touched."""

    class Late:
        pass

    register(Late, lambda late: 3, lambda content: Late(), name="late-type")
    place = saved({"w": torch.ones(2), "x": Late()}, tmp_path, single)
    assert isinstance(load({"x": None}, place, ps=single)["x"], Late)
    register(Late, lambda late: 3, _fails, name="late-type")
    target = torch.zeros(2)
    with pytest.raises(ValueError, match=r"x: 3 is no late-type \(KeyError"):
        load({"w": target, "x": None}, place, ps=single)
    assert not target.any()


def _fails(content):
    raise KeyError(content)


def test_names_of_types(rates):
    with pytest.raises(ValueError, match="is called 'Rate' in checkpoints; give name="):
        register(Fraction, str, Fraction, name="Rate")
    with pytest.raises(ValueError, match="is called 'numpy' in checkpoints"):
        register(Fraction, str, Fraction, name="numpy")
    with pytest.raises(ValueError, match=r"of type .Fraction., which is unknown here: call .*register"):
        decode({"$type": "Fraction", "value": "1/2"})
    with pytest.raises(ValueError, match="of type None, which is unknown"):
        decode({"$type": None})
    for hostile in ({"$type": "numpy", "value": ["O", 1]}, {"$type": "float", "value": "1e5"}, {"$type": "bytes"}):
        with pytest.raises(ValueError, match=r"is no (numpy|float|bytes)"):
            decode(hostile)


def test_what_could_be_saved_before_is_the_same_bytes(tmp_path, single):
    """The digest is of version 0.1's files. A value that needs a tag, and nothing else, makes a format of 2."""
    kinds = ("int8", "int16", "int32", "int64", "uint8", "float16", "float64", "bool", "float8_e5m2")
    state = small.state(5) | {
        "args": {"lr": [0.1, 2, None, True, {"a": [1, "x"]}], 7: "seven", "__v__": 1},
        "a/b": 3,
        "plain": {name: torch.arange(6).to(getattr(torch, name)).view(2, 3) for name in kinds},
    }
    place = saved(state, tmp_path, single)
    digest = hashlib.sha256()
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.parent.name != "receipts" and path.name != "manifest.json":
            digest.update(str(path.relative_to(place)).encode() + b"\0" + path.read_bytes())
    assert digest.hexdigest() == "f6dac51aab64a4c45ecb3017c9d3b26767d266dca1cc1af3c1b3bf2e74090aae"
    assert StoredCheckpoint.open(place).format == 1
    assert StoredCheckpoint.open(saved(state | {"t": [()]}, tmp_path, single)).format == 2


def test_format_1_has_no_tags(tmp_path, single, monkeypatch):
    """What a user called `$type` then is a name, not a type."""
    monkeypatch.setattr("core.dist_checkpointing.state.catalog.encode", lambda value: value)
    monkeypatch.setattr("core.dist_checkpointing.planning.prepare.tagged", lambda value: False)
    place = saved({"x": [{"$type": "tuple", "value": [1]}]}, tmp_path, single)
    assert load_common_state_dict(place) == {"x": [{"$type": "tuple", "value": [1]}]}


@pytest.mark.parametrize("key", ["model/w", "étape 1", "a~b/__c", "%41", "x" * 200, "\ud800", "日本/語"])
def test_paths_of_keys(key):
    path = path_of(key)
    assert key_of(path) == key and path.isascii() and not {" ", "~", "\\"} & set(path)
    assert path == key or not all(c.isascii() and (c.isalnum() or c in "_-./") for c in key) or "__" in key


def test_mappings_come_back_as_dicts(tmp_path, single):
    state = {"x": OrderedDict(b=1, a=[OrderedDict(c=(2,))])}
    back = load(map_leaves(state, emptied), saved(state, tmp_path, single), ps=single)
    assert same(back, {"x": {"b": 1, "a": [{"c": (2,)}]}})
