"""`optimizer.state` shows shards: live, and a norm by hand of a part is told once."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.tensor_parallel import ColumnParallelLinear, Placement
from tests.states import state


def norm(states):
    return torch.stack([s["exp_avg"].norm() for s in states.values()]).norm()


def squares(states):
    return sum(s["exp_avg_sq"].sqrt().pow(2).sum() for s in states.values())


def product(states):
    return sum(torch.dot(s["exp_avg"].view(-1), s["exp_avg"].view(-1)) for s in states.values())


def written(states):
    for s in states.values():
        s["exp_avg"].mul_(0.5)
        s["exp_avg"][s["exp_avg"] == s["exp_avg"]] = 3.0
    return [str(s["exp_avg"]) + f"{s['step']}" for s in states.values()]


def said_of(look, zero_stage, tp):
    ps = state(tp=tp)
    torch.manual_seed(0)
    model = nn.Linear(32, 64, bias=False)
    if tp > 1:
        model = ColumnParallelLinear(32, 64, bias=False, place=Placement(ps.group("tp"), False, torch.float64))
        nn.init.ones_(model.weight)
    shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.01, clip_grad=0.0))
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            model(torch.ones(2, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            look(optimizer.state)
    if look is written and optimizer.state:
        first = next(iter(optimizer.states().values()))["exp_avg"].tensor
        assert first.view(-1)[0] == 3.0
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("zero_stage, tp", [(1, 1), (3, 1), (0, 2)])
@pytest.mark.parametrize("look", [norm, squares, product])
def test_a_number_of_a_part_is_told_once(ranks, look, zero_stage, tp):
    for told in ranks(said_of, look, zero_stage, tp, world=2):
        assert len(told) == 1 and "by hand sees" in told[0] and "other ranks hold the rest" in told[0], told
        assert "sees 1024 of the 2048 elements of exp_avg" in told[0]


def rows_by_number(states):
    for s in states.values():
        s["exp_avg"][torch.tensor([1, 5])] = 0.0


def columns_by_number(states):
    for s in states.values():
        with pytest.raises(IndexError):  # told before
            s["exp_avg"].view(-1)[:, 1]


def pruned_like(states):
    for s in states.values():
        s["exp_avg"].mul_(torch.rand_like(s["exp_avg"]) > 0.9)


def pruned_by_shape(states):
    for s in states.values():
        s["exp_avg"].mul_(torch.rand(s["exp_avg"].shape) > 0.9)


def pruned_by_value(states):
    for s in states.values():
        s["exp_avg"].mul_(s["exp_avg"].abs() > 1e-3)


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("look", [pruned_like, pruned_by_shape])
def test_moments_pruned_at_random_are_told_once(ranks, look, zero_stage):
    for told in ranks(said_of, look, zero_stage, 1, world=2):
        assert len(told) == 1 and "choose elements by their values" in told[0], told


@pytest.mark.parametrize("zero_stage, tp", [(1, 1), (3, 1), (0, 2)])
@pytest.mark.parametrize("look", [rows_by_number, columns_by_number])
def test_rows_of_a_part_by_number_are_told_once(ranks, look, zero_stage, tp):
    for told in ranks(said_of, look, zero_stage, tp, world=2):
        assert len(told) == 1 and "by hand sees 1024 of the 2048 elements of exp_avg" in told[0], told
        assert "not of the parameter's rows" in told[0]


@pytest.mark.parametrize(
    "look, zero_stage",
    [(norm, 0), (squares, 0), (written, 0), (written, 1), (written, 3), (pruned_by_value, 3), (pruned_like, 0)],
)
def test_whole_states_and_writes_hear_nothing(ranks, look, zero_stage):
    assert ranks(said_of, look, zero_stage, 1, world=2) == [[], []]


def test_states_of_ones_own_are_shown_their_place():
    """As Lookahead does, which puts slow weights beside the base optimizer's moments."""
    ps = state()
    model = nn.Linear(4, 4)
    shard = DataParallel(model, ps, zero_stage=1)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.01))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    remedy = r"in a dict of your own, keyed by the parameter: own\[p\] = "
    with pytest.raises(ValueError, match=remedy):
        optimizer.state[model.weight]["slow"] = model.weight.detach().clone()
    with pytest.raises(ValueError, match=remedy):
        optimizer.state[nn.Parameter(torch.ones(3))] = {}
    with pytest.raises(KeyError, match=remedy):
        optimizer.state[nn.Parameter(torch.ones(3))]

    own = {p: p.detach().clone() for p in model.parameters()}
    with torch.no_grad():
        for p, slow in own.items():
            p.copy_(slow.lerp_(p, 0.5))
    assert torch.equal(own[model.weight], model.weight)


def test_a_count_is_a_copy_and_says_so_where_it_is_written_to():
    model = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    shard = DataParallel(model, state())
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=0.01))
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    count = optimizer.state[model.weight]["step"]
    assert float(count) == 1 and f"{count + 1}" == "2.0" and type(count + 1) is torch.Tensor
    for write in (lambda: count.zero_(), lambda: count.copy_(count), lambda: count.add_(1)):
        with pytest.raises(
            ValueError, match=r"which is a copy: .* To begin anew load a state_dict\(\) of before the"
        ):
            write()
    assert float(optimizer.state[model.weight]["step"]) == 1
