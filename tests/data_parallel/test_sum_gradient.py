"""`sum_gradient` of a parameter of the program's own, which each tensor rank applies to a part."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.tensor_parallel import sum_gradient
from tests.models.gpt import batch, gpt
from tests.states import state


class Scaled(nn.Module):
    """A column linear whose output, [s, b, ffn/tp], is multiplied by a scalar of all ranks."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) * sum_gradient(self.scale, self.group)


def scales(tp, zero):
    """After three steps; zero: None without DataParallel."""
    ps = state(tp=tp)
    model = gpt("gpt2", parallel=ps).requires_grad_(False)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1 = Scaled(layer.mlp.linear_fc1, model.place.group)
    if zero is not None:
        shard = DataParallel(model, ps, zero_stage=zero)
    optimizer = torch.optim.SGD([layer.mlp.linear_fc1.scale for layer in model.decoder.layers], lr=0.1)
    for step in range(3):
        tokens, labels = batch(step)
        model(tokens, labels=labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if zero is not None:
        shard.remove()
    return [layer.mlp.linear_fc1.scale.item() for layer in model.decoder.layers]


@pytest.mark.parametrize("zero", [None, 0, 1, 2])
def test_whoever_owns_the_gradient_it_is_summed_once(ranks, zero):
    (whole,) = ranks(scales, 1, None, world=1)
    for of_rank in ranks(scales, 2, zero, world=2):
        assert of_rank == pytest.approx(whole, rel=1e-12)
    assert whole != [1.0, 1.0]
