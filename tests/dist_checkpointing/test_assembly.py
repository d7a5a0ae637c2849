"""Tensors made of several saved ones, or of parts: what is read is what torch makes of the whole ones."""

import random
from itertools import pairwise
from math import prod

import pytest
import torch

from core.dist_checkpointing import Concat, ShardedTensor, Source, load
from core.dist_checkpointing.reading import direct
from core.dist_checkpointing.reading.read import read
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.state.assembly import assemble
from core.dist_checkpointing.state.names import KeyMapping
from core.dist_checkpointing.state.reshaping import resolved_shape
from core.dist_checkpointing.storage import zarr_store
from core.dist_checkpointing.writing.saving import Saver
from core.parallel_state.flat import extent, flat_boxes, slices, volume
from tests.dist_checkpointing.meshes import small_cells

SHAPES = {"a": (6, 8), "b": (48,), "c": (2, 12, 4), "d": (3, 1, 16), "e": (5, 7), "scalar": ()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Arrays of many cells, and their values."""
    from core.parallel_state import ParallelState

    root = tmp_path_factory.mktemp("saved")
    values = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    values["f"] = torch.arange(64 * 96).view(64, 96).double()
    with small_cells():
        Saver(str(root), ParallelState.single("cpu"), durable=False).save("x", values)
    return StoredCheckpoint.open(root / "x"), values


def split(n, rng):
    """A number as up to three factors."""
    factors = []
    for _ in range(rng.randrange(3)):
        factors.append(rng.choice([d for d in range(1, n + 1) if n % d == 0]))
        n //= factors[-1]
    return [*factors, n]


def random_source(name, shape, rng):
    """(what is read, the same by torch)."""
    form, twin = Source(name), lambda values: values[name]
    if rng.random() < 0.6:
        dims = [m for n in shape for m in split(n, rng)]
        while len(dims) > 1 and rng.random() < 0.5:
            at = rng.randrange(len(dims) - 1)
            dims[at : at + 2] = [dims[at] * dims[at + 1]]
        try:
            shape = resolved_shape(tuple(dims), shape)
        except ValueError:  # some that torch takes are refused
            pass
        else:
            form, twin = Source(name, shape=shape), lambda values: values[name].reshape(shape)
    if rng.random() < 0.6 and shape:
        index = []
        for n in shape:
            start = rng.randrange(n)
            index.append(start if rng.random() < 0.2 else slice(start, rng.randrange(start, n) + 1))
        form, whole_twin = form[tuple(index)], twin
        return form, lambda values: whole_twin(values)[tuple(index)]
    return form, twin


def random_concat(form, twin, values, rng):
    """Several behind each other, sometimes of unequal length along the dim."""
    shape = tuple(twin(values).shape)
    if not shape or rng.random() < 0.3:
        return form, twin
    dim = rng.randrange(-len(shape), len(shape))
    forms, twins = [form], [twin]
    repeat = rng.randrange(1, 4)
    forms, twins = repeat * forms, repeat * twins
    if not form.index and form.shape is None and rng.random() < 0.5:
        cut = rng.randrange(shape[dim]) + 1
        index = tuple(slice(0, cut) if d == dim % len(shape) else slice(None) for d in range(len(shape)))
        forms.append(form[index])
        twins.append(lambda values: twin(values)[index])
    return Concat(forms, dim), lambda values: torch.cat([one(values) for one in twins], dim)


def parts(tensor, rng):
    """The boxes of all ranks: cuts of one dim, or of the flat form; their memory is a part of a larger one."""
    shape = tuple(tensor.shape)
    cuts = sorted({0, prod(shape), *(rng.randrange(prod(shape) + 1) for _ in range(3))})
    boxes = [box for a, b in pairwise(cuts) for box in flat_boxes(shape, a, b)]
    if shape and rng.random() < 0.5:
        dim = rng.randrange(len(shape))
        edges = sorted({0, shape[dim], rng.randrange(shape[dim] + 1)})
        boxes = [tuple((a, b) if d == dim else (0, n) for d, n in enumerate(shape)) for a, b in pairwise(edges)]
    for box in boxes:
        larger = torch.full([n + 2 for n in extent(box)], -1.0, dtype=torch.float64)
        yield box, larger[tuple(slice(1, 1 + n) for n in extent(box))]


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_torch_makes_of_it(saved, seed):
    """Bit for bit, over random forms and random cuts; no element is read that nobody asked for."""
    stored, values = saved
    rng = random.Random(seed)
    for _ in range(100):
        name = rng.choice(list(values))
        form, twin = random_concat(*random_source(name, tuple(values[name].shape), rng), values, rng)
        expected = twin(values)
        made = assemble(KeyMapping({"w": form}).source("w"), stored)
        assert made.shape == tuple(expected.shape), form
        for box, memory in parts(expected, rng):
            wanted = {}
            for key, part, target in made.targets(box, memory):
                assert extent(part) == tuple(target.shape)
                wanted.setdefault(key, []).append((part, target))
            assert sum(volume(part) for found in wanted.values() for part, _ in found) == volume(box)
            read(stored, wanted)
            assert torch.equal(memory, expected[slices(box)]), (form, box)


def test_merging_and_taking_apart(tmp_path, single):
    """By the public names: q, k, v in groups, gate and up; and back, with a cast for one of the sources."""
    groups, q, d, h = 2, 3, 4, 5
    state = {
        "q": torch.randn(groups * q * d, h).double(),
        "k": torch.randn(groups * d, h).double(),
        "v": torch.randn(groups * d, h).float(),
        "gate": torch.randn(7, h).double(),
        "up": torch.randn(7, h).double(),
    }
    saver = Saver(str(tmp_path), single, durable=False)
    saver.save("x", {"model": state})
    merged = {"qkv": torch.zeros(groups, q + 2, d, h).double(), "gate_up": torch.zeros(14, h).double()}
    names = {
        "model/qkv": Concat(
            [
                Source("model/q", shape=(groups, q, d, h)),
                Source("model/k", shape=(groups, 1, -1, h)),
                Source("model/v", shape=(groups, 1, d, h), cast=True),
            ],
            dim=1,
        ),
        "model/gate_up": Concat(["model/gate", "model/up"]),
    }
    load({"model": merged}, tmp_path / "x", ps=single, mapping=names)
    views = [state[name].double().view(groups, -1, d, h) for name in "qkv"]
    assert torch.equal(merged["qkv"], torch.cat(views, 1))
    assert torch.equal(merged["gate_up"], torch.cat([state["gate"], state["up"]]))
    saver.save("y", {"model": merged})
    apart = {name: torch.zeros_like(state[name], dtype=torch.float64) for name in ("gate", "up")}
    apart |= {name: torch.zeros(groups, d, h).double() for name in "kv"} | {
        "q": torch.zeros(groups, q, d, h).double()
    }
    back = {"gate": Source("model/gate_up")[:7], "up": Source("model/gate_up")[7:]}
    back |= {name: Source("model/qkv")[:, at] for name, at in (("q", slice(q)), ("k", q), ("v", -1))}
    load({"model": apart}, tmp_path / "y", ps=single, mapping={f"model/{name}": form for name, form in back.items()})
    for name, value in apart.items():
        assert torch.equal(value.view(state[name].shape), state[name].double()), name


def test_what_does_not_add_up(saved, single):
    """Both numbers, before anything is read."""
    stored, _ = saved
    target = torch.full((12, 8), -1.0, dtype=torch.float64)
    for form, told in (
        (Concat(["a", "b"]), r"a \(6, 8\), b \(48,\) cannot be one behind the other along dim 0"),
        (Concat(["a", "a"], dim=1), r"its shape is \(6, 16\) made of what is in the checkpoint and \(12, 8\) here"),
        (Concat(["a", "e"]), r"a \(6, 8\), e \(5, 7\) cannot be one"),
        (Concat(["a", "none"]), r"w: none is not in the checkpoint"),
        (Concat(["a", "a"], dim=2), r"along dim 2"),
        (Concat(["a", Source("a")[:5]]), r"its shape is \(11, 8\) made of .* and \(12, 8\) here"),
        (Source("a"), r"its shape is \(6, 8\) in the checkpoint and \(12, 8\) here"),
        (Source("a")[9], r"a: 9 is out of range for a dim of 6"),
        (Source("a")[4:4], r"a: \[slice\(4, 4, None\)\] takes nothing of \(6, 8\)"),
        (Source("a")[::2], r"only steps of 1"),
        (Source("a", shape=(12, 8)), r"a: \(6, 8\) has 48 elements, \(12, 8\) has 96"),
        (Source("a", shape=(-1, -1)), r"a: \(6, 8\) has 48 elements"),
        (Source("a", shape=(16, 3)), r"a: \(6, 8\) as \(16, 3\) cuts across dims"),
        (Source("none"), r"missing in the checkpoint: w"),
    ):
        with pytest.raises(ValueError, match=told):
            load({"w": target}, stored.directory.url, ps=single, mapping={"w": form}, strict=True)
        _, report = load({"w": target}, stored.directory.url, ps=single, mapping={"w": form}, strict="report")
        assert (
            report.missing == ("w",) * (form == Source("none")) and len(report.mismatched) + len(report.missing) == 1
        )
    assert (target == -1).all()
    with pytest.raises(ValueError, match=r"the mapping gives Concat\(.*\) for n, which is a value here"):
        load({"n": 3}, stored.directory.url, ps=single, mapping={"n": Concat(["a"])}, strict=False)
    for wrong in (lambda: Concat([]), lambda: Concat("ab"), lambda: Concat([3]), lambda: Concat(["a"], dim="x")):
        with pytest.raises(ValueError, match="Concat"):
            wrong()
    with pytest.raises(ValueError, match="is a part already"):
        Source("a")[0][1]


def test_other_dtypes_are_told_of_their_source(tmp_path, single):
    Saver(str(tmp_path), single, durable=False).save("x", {"a": torch.ones(2), "b": torch.ones(3).half()})
    with pytest.raises(ValueError, match="w: b: it is float16 in the checkpoint and float32 here; give cast=True"):
        load({"w": torch.zeros(5)}, tmp_path / "x", ps=single, mapping={"w": Concat(["a", "b"])})
    made = load({"w": torch.zeros(5)}, tmp_path / "x", ps=single, mapping={"w": Concat(["a", "b"])}, cast=True)
    assert made["w"].tolist() == [1] * 5


def test_an_array_is_asked_for_where_a_part_of_it_is(tmp_path, single):
    Saver(str(tmp_path), single, durable=False).save("x", {"model": {"a": torch.arange(6), "b": torch.ones(2)}})
    target = {"model": {"half": torch.zeros(3, dtype=torch.int64)}}
    names = {"model/half": Source("model/a")[3:]}
    _, report = load(target, tmp_path / "x", ps=single, mapping=names, strict="report")
    assert report.unexpected == ("model/b",) and target["model"]["half"].tolist() == [3, 4, 5]


def test_a_rank_reads_what_it_needs(tmp_path, single, monkeypatch):
    """An eighth of the rows of q, k, v is an eighth of the elements."""
    value = torch.arange(2**19, dtype=torch.float64).view(2**10, 2**9)  # 4 MiB: pieces of 1 MiB
    Saver(str(tmp_path), single, durable=False).save("x", {name: value + i for i, name in enumerate("qkv")})
    sizes = []
    for home in (direct.DirectReader, zarr_store.Reader):
        real = home.read
        monkeypatch.setattr(
            home,
            "read",
            lambda self, key, box, into, real=real: sizes.append(volume(box)) or real(self, key, box, into),
        )
    mine = torch.zeros(128, 3, 2**9, dtype=torch.float64)
    part = ShardedTensor("w", mine, (2**10, 3, 2**9), (256, 0, 0))
    form = Concat([Source(name, shape=(2**10, 1, 2**9)) for name in "qkv"], dim=1)
    load({"w": part}, tmp_path / "x", ps=single, mapping={"w": form})
    assert torch.equal(mine, torch.stack([value[256:384] + i for i in range(3)], 1))
    assert sum(sizes) == mine.numel()
