"""Replicas that have parted: told before a byte is written, never a checkpoint of some of each."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.dist_checkpointing import CheckpointManager, ShardedTensor, load, load_plain_tensors, save
from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.planning.plan import plan_writes
from core.dist_checkpointing.state.mapping import sharded_state_dict
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.optimizer.state.sharded_states import sharded_state_dict as of_shard
from core.parallel_state.collectives import checks
from tests.states import state as parallel


def test_who_holds_the_same():
    """Boxes of one rank alone are no replicas; of several sets of ranks each is one entry."""
    rows = ((0, 2), (0, 3)), ((2, 4), (0, 3))
    holdings = [
        {"w": (rows[0],), "all": (((0, 5),),)},
        {"w": (rows[1],), "all": (((0, 5),),)},
        {"w": (rows[0],), "all": (((0, 5),),)},
        {"w": (rows[1],), "all": (((0, 5),),), "own": (((0, 1),),)},
    ]
    arrays = {name: ArrayInfo(shape, "float32") for name, shape in (("w", (4, 3)), ("all", (5,)), ("own", (1,)))}
    assert plan_writes(arrays, holdings).replicas == {
        (0, 1, 2, 3): [("all", ((0, 5),))],
        (0, 2): [("w", rows[0])],
        (1, 3): [("w", rows[1])],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
@pytest.mark.parametrize("size", [3, 1000, 70_001])
def test_numbers_of_the_bits(dtype, size):
    """One element anywhere, a sign that is turned, everything doubled; copies and other strides are equal."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (values > 0) if dtype == torch.bool else values.to(dtype)

    def words(tensor):
        return checks.mixed_words(checks.block_sums(tensor)).tolist()

    seen = {tuple(words(x))}
    assert words(torch.stack((x, x), 1)[:, 1]) == words(torch.cat((x[:1], x))[1:]) == words(x)
    for place in {0, size // 2, size - 1}:
        changed = x.clone()
        changed[place] = not x[place] if dtype == torch.bool else x[place] + 1
        seen.add(tuple(words(changed)))
    if dtype != torch.bool:
        seen |= {tuple(words(-x)), tuple(words(2 * x)), tuple(words(torch.zeros_like(x)))}
    assert len(seen) == len({0, size // 2, size - 1}) + (1 if dtype == torch.bool else 4)


def trained(ps, zero_stage, parted):
    """A module and its optimizer after a step; `parted`: each rank of its own batch, and nothing is summed."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
    shard = DataParallel(module, ps, zero_stage=zero_stage)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.1))
    torch.manual_seed(ps.rank)
    module(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    if parted == "weight":
        with torch.no_grad():
            module[2].bias[1] += ps.index("dp")
    elif parted == "moment":
        optimizer.states()["0.weight"]["exp_avg"].tensor.add_(ps.index("dp"))
    return shard, optimizer


def saved(root, zero_stage, parted):
    ps = parallel()
    shard, optimizer = trained(ps, zero_stage, parted)
    manager = CheckpointManager(root, ps=ps)
    state = {"model": of_shard(shard), "optimizer": optimizer.sharded_state_dict()}
    for call in (
        lambda: manager.save(1, state),
        lambda: manager.save_async(2, state),
        lambda: manager.prepare(state),
    ):
        with pytest.raises(
            ValueError, match="differs between rank 0 and rank 1, which both hold it: nothing was"
        ) as told:
            call()
    assert not manager.steps()
    manager.close()
    return str(told.value)


@pytest.mark.parametrize("zero_stage, parted", [(0, "weight"), (0, "moment"), (2, "weight")])
def test_parted_replicas_are_refused(ranks, tmp_path, zero_stage, parted):
    told = ranks(saved, str(tmp_path), zero_stage, parted, world=2)
    assert told[0] == told[1]
    assert ("model/2.bias at [(0, 3)]" if parted == "weight" else "optimizer/exp_avg/0.weight") in told[0]


def statistics(root):
    """Under torch's DDP each rank has those of its own last batch: saved are the first rank's, not some of each."""
    ps = parallel()
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.BatchNorm1d(5) for _ in range(6)])
    torch.manual_seed(1 + ps.rank)
    module(torch.randn(8, 5))
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    save({"model": sharded_state_dict(module, ps)}, f"{root}/x", ps=ps)
    stored = load_plain_tensors(f"{root}/x")
    return [torch.equal(stored[f"model/{name}"], tensor) for name, tensor in own.items()], own["5.running_mean"]


def test_running_statistics_are_the_first_ranks(ranks, tmp_path):
    (first, mean), (_, other) = ranks(statistics, str(tmp_path), world=2)
    assert all(first)
    assert not torch.equal(mean, other), "each rank has its own"


def buffers(folder, axis, parts):
    """What is told at a save of a buffer that is another on every rank; what the checkpoint has of it."""
    ps = parallel(tp=2 if axis == "tp" else 1)
    module = nn.BatchNorm1d(3, affine=False)
    module.running_mean.add_(ps.rank)
    state = sharded_state_dict(module, ps)
    if parts:
        given = {name: tensor for name, tensor in module.state_dict().items() if tensor.dim()}
        for name, buffer in given.items():
            state[name] = ShardedTensor.from_rank_offsets(f"model/{name}", buffer, (0, ps.index(axis), 2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save({"model": state}, folder / "step", ps=ps)
    return [str(one.message) for one in told], load_plain_tensors(folder / "step")["model/running_mean"].tolist()


@pytest.mark.parametrize(("axis", "parts"), [("tp", False), ("tp", True), ("dp", False)])
def test_buffers_of_a_tensor_ranks_own_channels_are_told(ranks, tmp_path, axis, parts):
    saved = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] if parts else [0.0, 0.0, 0.0]
    for told, found in ranks(buffers, tmp_path, axis, parts, world=2):
        assert found == saved
        if axis == "dp" or parts:
            assert not told
        else:
            (message,) = told
            assert "model/running_mean differs between tensor ranks 0 and 1" in message


def save_draws(root):
    ps = parallel()
    torch.manual_seed(ps.rank)
    draws = torch.get_rng_state()
    for own in (draws, bytes(draws.numpy())):
        with pytest.raises(ValueError, match=r"a key of its own.*\{f'rank\{rank\}': value\}") as told:
            save({"draws": {"torch": own}}, f"{root}/x", ps=ps)
        assert len(str(told.value)) < 500
    save({"draws": {f"rank{ps.rank}": draws}}, f"{root}/x", ps=ps)
    found = load({"draws": {f"rank{ps.rank}": torch.zeros_like(draws)}}, f"{root}/x", ps=ps)
    assert torch.equal(found["draws"][f"rank{ps.rank}"], draws)


def test_states_of_random_numbers_have_a_key_on_each_rank(ranks, tmp_path):
    ranks(save_draws, str(tmp_path), world=2)
