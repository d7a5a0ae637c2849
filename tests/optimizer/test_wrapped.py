"""An optimizer of another library around ours (timm's Lookahead), whose `zero_grad` is torch's or the program's."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW, sharded_state_dict
from tests.states import state

STEPS = 4


class Wrapper(torch.optim.Optimizer):
    """Made as timm makes it: without `super().__init__`."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure=None):
        return self.base.step(closure)


def by_hand(optimizer, model):
    for parameter in model.parameters():
        parameter.grad = None


ZEROES = {
    "its own": lambda optimizer, model: optimizer.zero_grad(),
    "the model's": lambda optimizer, model: model.zero_grad(),
    "by hand": by_hand,
}


def trained(zero, wrap, stage):
    ps = state()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    base = ShardedAdamW(DataParallel(model, ps, zero_stage=stage), OptimizerConfig(lr=1e-2, clip_grad=0.0))
    optimizer = Wrapper(base) if wrap else base
    for _ in range(STEPS):
        ZEROES[zero](optimizer, model)
        model(torch.full((2, 4), 1.0 + ps.index("dp"))).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("zero", ZEROES)
def test_a_wrapper_changes_nothing(ranks, zero, stage):
    for wrapped, plain in zip(
        ranks(trained, zero, True, stage), ranks(trained, "its own", False, stage), strict=True
    ):
        torch.testing.assert_close(wrapped, plain, rtol=0, atol=0)


def stepped_twice():
    model = nn.Linear(4, 4)
    base = ShardedAdamW(DataParallel(model, state(), zero_stage=0), OptimizerConfig(lr=1e-2))
    model(torch.ones(2, 4)).mean().backward()
    base.step()
    with pytest.raises(ValueError, match="used up by step 1"):
        base.step()


def test_a_second_step_on_the_same_gradients_is_refused(ranks):
    ranks(stepped_twice)


def test_states_of_a_module_alone_are_asked_elsewhere():
    with pytest.raises(ValueError, match=r"takes the DataParallel, not its Linear.*core.dist_checkpointing"):
        sharded_state_dict(nn.Linear(2, 2))


def test_torchs_state_dict_of_checkpoints_is_told_the_way():
    model = nn.Linear(4, 4)
    optimizer = ShardedAdamW(DataParallel(model, state()), OptimizerConfig(lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"use optimizer\.sharded_state_dict\(\)"):
        get_state_dict(model, optimizer)
