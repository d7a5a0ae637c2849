"""Order of `param_groups`, and what checkpoints keep of it."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.optimizer.build import build_optimizer
from tests.optimizer.fake_shard import FakeShard
from tests.states import state


def made(*groups, **fields):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return ShardedAdamW(FakeShard(model), OptimizerConfig(lr=0.5, clip_grad=0.0, **fields), groups=groups)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


WEIGHTS = {"names": "*.weight", "lr": 0.25}
BIASES = {"names": "*.bias", "lr": 0.125}


def test_given_groups_have_their_numbers():
    assert rates(made()) == [0.5]
    both = made(WEIGHTS, BIASES)
    assert rates(both) == [0.25, 0.125] and both.learning_rate == 0.25
    assert [p.dim() for p in both.param_groups[1]["params"]] == [1, 1]
    # parameters that are left over come last, or where a group asks for them
    some = made(BIASES)
    assert rates(some) == [0.125, 0.5] and some.learning_rate == 0.5
    assert [p.dim() for p in some.param_groups[1]["params"]] == [2, 2]
    assert rates(made({"rest": True}, BIASES)) == [0.5, 0.125]
    with pytest.raises(ValueError, match="param group 1: 'none' is the name of none of 4"):
        made(WEIGHTS, {"names": "none"})


def test_a_parameter_is_in_the_params_of_one_group():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model.parameters()}, {"params": [model[1].weight], "lr": 0.25}]
    with pytest.raises(ValueError, match=r"param groups 0 and 1 both have 1\.weight; leave it out of one of them"):
        ShardedAdamW(FakeShard(model), OptimizerConfig(lr=0.5), groups=groups)
    # the last pattern that matches counts, as for a configuration's multipliers
    assert [p.dim() for p in made({"names": "*"}, BIASES).param_groups[1]["params"]] == [1, 1]


def test_a_configurations_patterns_leave_number_0_to_the_rest():
    model = nn.Sequential(nn.Linear(3, 4))
    config = OptimizerConfig(lr=0.5, lr_multipliers={"*": 0.5})
    optimizer = build_optimizer(FakeShard(model), config)
    assert rates(optimizer) == [0.5, 0.25] and optimizer.learning_rate == 0.5
    assert not optimizer.param_groups[0]["params"]
    assert rates(build_optimizer(FakeShard(nn.Linear(3, 4)), OptimizerConfig(lr=0.5))) == [0.5]


# of earlier versions: the group of the rest was number 0, and there also where it was empty
@pytest.mark.parametrize(
    ("groups", "before", "after"),
    [((WEIGHTS, BIASES), [9.0, 0.75, 0.375], [0.75, 0.375]), ((BIASES,), [0.75, 0.375], [0.375, 0.75])],
)
def test_states_of_earlier_versions_are_loaded(groups, before, after):
    state = made(*groups).state_dict()
    del state["rest"]
    options = {key: value for key, value in state["param_groups"][0].items() if key != "lr"}
    state["param_groups"] = [{"lr": rate, **options} for rate in before]
    again = made(*groups)
    again.load_state_dict(state)
    assert rates(again) == after
    # of a checkpoint
    counts = {"steps": 3, "behind": {}, "groups": state["param_groups"]}
    again = made(*groups)
    again._resume(counts, 0)
    assert rates(again) == after and again.step_count == 3


@pytest.mark.parametrize("groups", [(WEIGHTS, BIASES), (BIASES,), ({"rest": True}, BIASES), ()])
def test_states_come_back(groups):
    one = made(*groups)
    for number, group in enumerate(one.param_groups):
        group["lr"] = 1.0 + number
    again = made(*groups)
    again.load_state_dict(one.state_dict())
    assert rates(again) == rates(one)
    saved = one._counts()["step_count"]
    # earlier versions open it: one more than what was given
    assert len(saved["groups"]) == 1 + sum("rest" not in group for group in groups)
    again = made(*groups)
    again._resume(saved, 0)
    assert rates(again) == rates(one)
    with pytest.raises(ValueError, match=r"param_groups beside that of the rest were saved, this optimizer has 3"):
        made(*[{"names": name} for name in ("0.*", "1.weight", "1.bias")]).load_state_dict(one.state_dict())


def of_a_stage():
    ps = state(pp=2)
    layers = {"a": nn.Linear(3, 4)} if ps.index("pp") == 0 else {"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)}
    optimizer = ShardedAdamW(DataParallel(nn.ModuleDict(layers), ps), OptimizerConfig(lr=0.5), groups=[A])
    return [(group["lr"], len(group["params"])) for group in optimizer.param_groups]


A = {"names": "a.*", "lr": 0.25}


def test_stages_have_as_many_groups(ranks):
    """What is left over lies on one of them."""
    assert ranks(of_a_stage, world=2) == [[(0.25, 2), (0.5, 0)], [(0.25, 2), (0.5, 2)]]


def test_options_of_the_programs_own_stay_in_their_group():
    """As in torch: `lr_scale` of MAE's and BEiT's layer decay, which their schedules read."""
    optimizer = made(BIASES | {"lr_scale": 0.5}, {"rest": True, "layer": 3})
    assert [group.get("lr_scale") for group in optimizer.param_groups] == [0.5, None]
    again = made(BIASES | {"lr_scale": 1.0}, {"rest": True, "layer": 1})
    again.load_state_dict(optimizer.state_dict())
    assert [(g.get("lr_scale"), g.get("layer")) for g in again.param_groups] == [(0.5, None), (None, 3)]


@pytest.mark.parametrize("option", ["weigth_decay", "beta", "momentum", "amsgrad", "learning_rate"])
def test_an_option_of_another_optimizer_is_refused(option):
    with pytest.raises(ValueError, match=f"param group 0 has {option}; known are names, params, name, lr, betas"):
        made(BIASES | {option: 0.5})
    assert made(BIASES | {"amsgrad": False})
