"""Which twin is stored: a weight that is its main parameter rounded is left out, one that differs in a bit is not."""

import json

import pytest
import torch

from core.dist_checkpointing import ShardedTensor, load
from core.dist_checkpointing.state.derive import stored_source
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.dist_checkpointing.writing.saving import Saver
from core.optimizer import OptimizerConfig
from tests.dist_checkpointing import small
from tests.states import state as parallel
from tests.twins.adamw import AdamW
from tests.twins.per_parameter import PerParameterGradSync

MAIN = torch.linspace(-3, 3, 20, dtype=torch.float32).view(4, 5)


def stored(directory):
    """(keys of the arrays on disk, the table of derived ones), read without the package."""
    root = json.loads((directory / "zarr.json").read_text())
    nodes = root["consolidated_metadata"]["metadata"]
    keys = {key for key, node in nodes.items() if node["node_type"] == "array"}
    return keys, root["attributes"]["paracore"]["derived"]


def pair(weight, main=MAIN):
    return {"model": {"w": weight}, "optimizer": {"main": {"w": main}}}


def empty(like):
    return pair(torch.zeros_like(like["model"]["w"]), torch.zeros_like(like["optimizer"]["main"]["w"]))


SAVED = {  # weight -> is it left out?
    "rounded": (MAIN.bfloat16(), True),
    "rounded to fp16": (MAIN.half(), True),
    "rounded down": ((MAIN.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16(), False),
    "one element edited": (MAIN.bfloat16().index_fill(0, torch.tensor([2]), 1.0), False),
    "minus zero": (torch.zeros(4, 5).bfloat16().neg(), False),
    "transposed in memory": (MAIN.T.contiguous().T.bfloat16(), True),
}


@pytest.mark.parametrize("name", SAVED)
def test_exact_whether_stored_or_not(tmp_path, single, name):
    weight, left_out = SAVED[name]
    given = pair(weight, torch.zeros(4, 5) if name == "minus zero" else MAIN)
    Saver(str(tmp_path), single, durable=False).save("x", given)
    keys, table = stored(tmp_path / "x")
    assert ("model/w" not in keys) == left_out == ("model/w" in table) and "optimizer/main/w" in keys
    found = load(empty(given), tmp_path / "x", ps=single)
    assert torch.equal(found["model"]["w"].view(torch.int16), weight.view(torch.int16))
    assert torch.equal(found["optimizer"]["main"]["w"], given["optimizer"]["main"]["w"])


def test_stochastic_rounding_is_noticed(tmp_path, single):
    main = torch.randn(50, 40, dtype=torch.float32)
    noise = torch.randint(0, 1 << 16, main.shape, dtype=torch.int32)
    weight = (main.view(torch.int32) + noise >> 16 << 16).view(torch.float32).bfloat16()
    assert 0.2 < (weight == main.bfloat16()).float().mean() < 0.95
    Saver(str(tmp_path), single, durable=False).save("x", pair(weight, main))
    assert stored(tmp_path / "x") == ({"model/w", "optimizer/main/w"}, {})
    assert torch.equal(load(empty(pair(weight, main)), tmp_path / "x", ps=single)["model"]["w"], weight)


@pytest.mark.parametrize(
    ("weight", "main"),
    [
        (MAIN.bfloat16(), None),  # frozen: no main at all
        (MAIN.bfloat16(), MAIN.view(20)),  # a main of another shape
        (MAIN.bfloat16(), MAIN[:2].clone()),
    ],
)
def test_what_is_no_twin_is_stored(tmp_path, single, weight, main):
    given = {"model": {"w": weight}} if main is None else pair(weight, main)
    Saver(str(tmp_path), single, durable=False).save("x", given)
    keys, table = stored(tmp_path / "x")
    assert "model/w" in keys and not table
    found = load({"model": {"w": torch.zeros_like(weight)}}, tmp_path / "x", ps=single)
    assert torch.equal(found["model"]["w"], weight)


def test_of_two_alike_the_weight_is_stored(tmp_path, single):
    given = pair(MAIN.clone())
    saver = Saver(str(tmp_path), single, durable=False)
    saver.save("x", given)
    assert stored(tmp_path / "x") == ({"model/w"}, {})  # as a run that has no main parameter beside it
    found = load(empty(given), tmp_path / "x", ps=single)
    assert torch.equal(found["optimizer"]["main"]["w"], MAIN) and torch.equal(found["model"]["w"], MAIN)
    without = load({"model": {"w": torch.zeros(4, 5)}, "optimizer": {}}, tmp_path / "x", ps=single)
    assert torch.equal(without["model"]["w"], MAIN)


def test_for_a_release_weights_are_stored(tmp_path, single):
    Saver(str(tmp_path), single, durable=False, weights="bf16").save("x", pair(MAIN.bfloat16()))
    assert stored(tmp_path / "x") == ({"model/w", "optimizer/main/w"}, {})


def test_what_is_derived_changes_from_save_to_save(tmp_path, single):
    """One saver, whose plan is kept: rounded, edited, rounded again."""
    saver, weight = Saver(str(tmp_path), single, durable=False), MAIN.bfloat16()
    for name, value in (("a", weight), ("b", weight + 1), ("c", weight)):
        saver.save(name, pair(value))
        assert len(stored(tmp_path / name)[0]) == 1 + (name == "b")
        assert torch.equal(load(empty(pair(value)), tmp_path / name, ps=single)["model"]["w"], value)


def edited(root):
    """One element, on rank 1 only; the main parameters lie as flat halves that are not the weights' halves."""
    ps = parallel(tp=2)
    state = small.state(1, ps.rank, 2)
    weights = state["arrays"]["model/layers.w"]
    if ps.rank == 1:
        weights[2].data[1, 3] += 1
    saver = Saver(root, ps, durable=False)
    saver.save("x", state)
    found = small.state(0, ps.rank, 2, empty=True)
    load(found, f"{root}/x", ps=ps)
    for tensor, old in zip(small.tensors(found), small.tensors(state), strict=True):
        assert torch.equal(tensor.data, old.data), tensor.key
    main = MAIN.view(-1)[10 * ps.rank :][:10]
    halves = ShardedTensor("optimizer/main/w", main.view(2, 5), (4, 5), (2 * ps.rank, 0))
    saver.save("y", {"w": ShardedTensor("model/w", MAIN.bfloat16(), (4, 5), (0, 0)), "m": halves})
    other = ShardedTensor("optimizer/main/w", MAIN[:, 2 * ps.rank :][:, :3].clone(), (4, 5), (0, 2 * ps.rank))
    mine = ShardedTensor("model/w", MAIN.bfloat16()[2 * ps.rank :][:2], (4, 5), (2 * ps.rank, 0))
    saver.save("z", {"w": mine, "m": other})


def test_one_element_edited_on_one_rank(ranks, tmp_path):
    ranks(edited, str(tmp_path), world=2)
    keys, table = stored(tmp_path / "x")
    assert "model/layers.w" in keys and table.keys() == {"model/table", "model/layers.norm"}
    assert stored(tmp_path / "y") == (
        {"optimizer/main/w"},
        {"model/w": {"from": "optimizer/main/w", "torch_dtype": "bfloat16"}},
    )
    assert stored(tmp_path / "z")[0] == {"optimizer/main/w", "model/w"}, "no rank can compare all of its main"


def test_a_bf16_run_and_an_fp32_run_read_each_other(tmp_path, single):
    """The weights of one are the main parameters of the other, exactly."""
    saver = Saver(str(tmp_path), single, durable=False)
    saver.save("bf16", pair(MAIN.bfloat16()))
    saver.save("fp32", {"model": {"w": MAIN}, "optimizer": {"exp_avg": {"w": MAIN + 1}}})
    into = {"model": {"w": torch.zeros(4, 5, dtype=torch.float32)}}
    assert torch.equal(load(into, tmp_path / "bf16", ps=single)["model"]["w"], MAIN)
    into = {"optimizer": {"main": {"w": torch.zeros(4, 5)}, "exp_avg": {"w": torch.zeros(4, 5)}}}
    found = load(into, tmp_path / "fp32", ps=single)["optimizer"]
    assert torch.equal(found["main"]["w"], MAIN) and torch.equal(found["exp_avg"]["w"], MAIN + 1)
    found = load(
        pair(torch.zeros(4, 5).bfloat16(), torch.zeros(4, 5)), tmp_path / "fp32", ps=single, cast=True, strict=False
    )
    assert torch.equal(found["model"]["w"], MAIN.bfloat16()) and torch.equal(found["optimizer"]["main"]["w"], MAIN)


def test_where_an_array_comes_from():
    table = {"model/w": {"from": "optimizer/main/w", "torch_dtype": "bfloat16"}}
    assert (
        stored_source("a", {"a": 1}, {}) == "a"
        and stored_source("model/w", {"optimizer/main/w": 1}, table) == "optimizer/main/w"
    )
    assert (
        stored_source("model/w", {}, table) is None
        and stored_source("model/v", {"optimizer/main/v": 1}, table) is None
    )
    assert stored_source("optimizer/main/v", {"model/v": 1}, {}) == "model/v"
    assert stored_source("optimizer/exp_avg/v", {"model/v": 1}, {}) is None


def test_an_edited_weight_of_a_real_optimizer_stays_edited(tmp_path, single):
    """Resuming does not round it anew."""

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3).bfloat16()
        return model, AdamW(model, single, OptimizerConfig(), grad_sync=PerParameterGradSync(model, single))

    (model, optimizer), (again, resumed) = made(1), made(2)
    with torch.no_grad():
        model.weight[1, 1] = 5
    states = [
        {"model": sharded_state_dict(m, single), "optimizer": o.sharded_state_dict()}
        for m, o in ((model, optimizer), (again, resumed))
    ]
    Saver(str(tmp_path), single, durable=False).save("x", states[0])
    assert stored(tmp_path / "x")[1].keys() == {"model/bias"}
    resumed.load_state_dict(load(states[1], tmp_path / "x", ps=single)["optimizer"])
    assert torch.equal(again.weight, model.weight) and torch.equal(again.bias, model.bias)
    for name, kinds in optimizer.states().items():
        for kind, part in kinds.items():
            assert torch.equal(resumed.states()[name][kind].tensor, part.tensor), (name, kind)
