"""Parameters, stages and flat intervals as parts of global tensors: arithmetic, checked by assembling the wholes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core.dist_checkpointing import ShardedTensor
from core.dist_checkpointing.state.catalog import flatten
from core.dist_checkpointing.state.mapping import Mapper, sharded_state_dict, sharded_states, stacked_key
from core.parallel_state import Layout, ParallelConfig, ParallelState
from core.parallel_state.flat import slices


def at(rank, **sizes):
    config = ParallelConfig(**sizes)
    world = config.tensor * config.pipeline * (config.data or 1)
    return ParallelState(config.for_world(world), rank=rank)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_flat_intervals_of_all_ranks_are_the_whole(tp, dp):
    """A stacked, split and a padded parameter, each cut at any element of the local tensor over dp."""
    for layout, name in (
        (Layout((12, 5, 2), {"tp": 0}), "layers.2.w"),
        (Layout((3, 12), {"tp": 1}), "layers.0.w"),
        (Layout((10, 3), {"tp": 0}, padding={0: -10 % tp + tp}), "table"),
        (Layout((7,)), "layers.1.b"),
    ):
        whole = torch.arange(float(torch.Size(layout.shape).numel())).view(layout.shape)
        found = {}
        for rank in range(tp * dp):
            ps = at(rank, tensor=tp, data=dp)
            local = torch.full(layout.local_shape(ps.sizes), -1.0)
            box = layout.box(ps.coordinate, ps.sizes)
            local[tuple(slice(0, s.stop - s.start) for s in box)] = whole[box]
            flat, d = local.view(-1), ps.coordinate["dp"]
            start, stop = flat.numel() * d // dp, flat.numel() * (d + 1) // dp
            for part in Mapper(ps, {"layers": 4}).interval("g", name, flat[start:stop], layout, (start, stop)):
                stacked = name.startswith("layers")
                assert part.key == ("g/" + name.replace(".2", "").replace(".0", "").replace(".1", ""))
                assert part.global_shape == ((4,) if stacked else ()) + layout.shape
                target = found.setdefault(part.key, torch.full(part.global_shape, -2.0))
                target[slices(part.box)] = part.stacked_data
                assert part.data.numel() == 0 or part.data.untyped_storage().data_ptr() == local.data_ptr()
        (target,) = found.values()
        row = target[int(name.split(".")[1])] if name.startswith("layers") else target
        assert torch.equal(row, whole), (layout, tp, dp)


def test_an_interval_of_padding_is_nothing():
    """Not an empty list, which would be saved as a value, by one layout and not by another."""
    ps, layout = at(0, tensor=1, data=2), Layout((10, 3), padding={0: 6})
    parts = {
        name: {"main": SimpleNamespace(tensor=torch.zeros(b - a), layout=layout, interval=(a, b))}
        for name, (a, b) in {"some": (24, 36), "none": (33, 48)}.items()
    }
    found = sharded_states(parts, ps, stacks={})
    assert found["none"] == {} and [part.box for part in found["some"]["main"]] == [((8, 10), (0, 3))]
    assert not flatten(found).objects


def test_stacks():
    stacks = {"decoder.layers": 12}
    assert stacked_key("decoder.layers.7.mlp.w", stacks) == ("decoder.layers.mlp.w", 7, "decoder.layers")
    for name in ("decoder.layersx.7.w", "decoder.layers.7", "encoder.layers.7.w"):
        assert stacked_key(name, stacks) == (name, None, "")


def test_foreign_stages_have_names_of_their_own():
    """Two ranks hold different layers named `0.weight`: the number of the stage tells them apart."""
    for number in (0, 3):
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
        state = sharded_state_dict({number: module}, ParallelState.single("cpu"))
        assert f"stages.{number}.0.weight" in state and f"stages.{number}.1.running_mean" in state
        assert state[f"stages.{number}.1.num_batches_tracked"].global_shape == ()


def test_buffers_outside_the_state_stay_outside():
    module = nn.Linear(2, 2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.register_buffer("kept", torch.zeros(1))
    assert sharded_state_dict(module, ParallelState.single("cpu")).keys() == {"weight", "bias", "kept"}


def test_rank_offsets_as_in_megatron():
    data = torch.zeros(3, 4)
    part = ShardedTensor.from_rank_offsets("w", data, (0, 5, 12), (1, 1, 2), replica_id=1, prepend_axis_num=1)
    assert part.global_shape == (12, 6, 4) and part.global_offset == (5, 3, 0) and part.tp_dim == 1
    assert part.box == ((5, 6), (3, 6), (0, 4)) and part.stacked_data.shape == (1, 3, 4)
    with pytest.raises(ValueError, match=r"offset \(2, 2, 2\) needs an axis below 2 and a position below 2"):
        ShardedTensor.from_rank_offsets("w", data, (2, 2, 2))
    with pytest.raises(ValueError, match=r"does not lie in \(2, 4\)"):
        ShardedTensor("w", data, (2, 4), (0, 0))


@pytest.mark.parametrize(
    "key", ["../x", "a//b", "/a", "a/..", "a/zarr.json", "manifest.json", "", "é" * 34, "x" * 201]
)
def test_keys_that_are_no_paths_are_refused(key):
    with pytest.raises(ValueError, match="cannot be a path in a checkpoint"):
        flatten({"w": ShardedTensor(key, torch.zeros(1), (1,), (0,))})


def test_plain_values_and_tensors_of_a_state_dict():
    flat = flatten({"iteration": 7, "args": {"lr": [0.1, 2]}, "w": torch.ones(2)})
    assert flat.objects == {"iteration": 7, "args/lr": [0.1, 2]}
    assert flat.shards["w"][0].global_shape == (2,)
    with pytest.raises(
        ValueError, match=r"args/x: set cannot be saved; give .*, or call dist_checkpointing.register\(set,"
    ):
        flatten({"args": {"x": {1}}})
