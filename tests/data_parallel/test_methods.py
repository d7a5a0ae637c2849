"""A program that calls a method of the model, and a part of it, instead of `forward`: as on one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from tests.states import state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def hidden(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x):
        return self.head(self.hidden(x))


def losses_of(model, x, method_only):
    """By a method; by one layer alone, by `forward`: each a backward of its own."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(x.mean(1, keepdim=True))  # a forward that fails leaves nothing behind
    yield model.head(model.hidden(x)).square().mean()
    if method_only:
        return
    yield model.layers[1](x.mean(1, keepdim=True).expand(-1, 4)).square().mean()
    yield model(x).square().mean()


def rows(step, rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + rank))


def on_replicas(zero_stage, ours, method_only):
    torch.manual_seed(0)
    model = Model()
    wrapped = DataParallel(model, state(), zero_stage=zero_stage)
    if ours:
        optimizer = ShardedAdamW(wrapped, OptimizerConfig(lr=0.1, clip_grad=0.0, weight_decay=0.0))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ZeRO stage 3:.*read outside of its module's forward")
        for step in range(3):
            for loss in losses_of(model, rows(step, dist.get_rank()), method_only):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        x = rows(9, 0)
        return model.head(model.hidden(x)).detach()


def on_one_process(method_only):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for step in range(3):
        for loss in losses_of(model, torch.cat([rows(step, rank) for rank in range(2)]), method_only):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.head(model.hidden(rows(9, 0))).detach()


@pytest.mark.parametrize("method_only", [True, False])
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_methods_train_as_on_one_process(ranks, zero_stage, ours, method_only):
    expected = ranks(on_one_process, method_only, world=1)[0]
    for output in ranks(on_replicas, zero_stage, ours, method_only):
        torch.testing.assert_close(output, expected, rtol=1e-7, atol=1e-9)
