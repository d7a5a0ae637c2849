"""Numbers that a program makes of one rank's gradients by numpy or lists, by which it changes them, are told."""

import warnings

import numpy as np
import pytest
import torch

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state.collectives import all_reduce
from core.pipeline import Pipeline
from tests.pipeline.test_plain_loop import batch, loss, stages
from tests.states import state


def numpy_norm(gradients, model, step):
    norm = np.sqrt(sum(float((g.numpy() ** 2).sum()) for g in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / norm))


def sorted_threshold(gradients, model, step):
    values = sorted(v for g in gradients for v in g.abs().flatten().tolist())
    for gradient in gradients:
        gradient.masked_fill_(gradient.abs() < values[len(values) // 2], 0.0)


def guarded(found):
    def guard(gradients, model, step):
        if step == 1 and torch.distributed.get_rank() == 0:
            gradients[0].view(-1)[0] = float("nan")
        if any(map(found, gradients)):
            for gradient in gradients:
                gradient.zero_()

    return guard


GUARDS = {
    "a guard by item": lambda g: torch.isnan(g).any().item(),
    "a guard by numpy": lambda g: not np.isfinite(g.numpy()).all(),
}


def whole_norm(gradients, model, step):
    total = torch.zeros(()) + sum(float(g.norm()) ** 2 for g in gradients)
    all_reduce(total, state(pp=2).group("pp"))
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / float(total) ** 0.5))


def fixed_numbers(gradients, model, step):
    for gradient in gradients:
        gradient.mul_(0.5).masked_fill_(gradient.abs() < 1e-3, 0.0)


def by_layer(gradients, model, step):
    gradients[0].mul_(0.5 + torch.distributed.get_rank())


HABITS = {
    "numpy": (numpy_norm, "scaled by"),
    "sorted": (sorted_threshold, "compared with"),
    **{name: (guarded(found), "scaled by 0 on one") for name, found in GUARDS.items()},
    "the model's norm": (whole_norm, ""),
    "fixed numbers": (fixed_numbers, ""),
    "a rate of one layer": (by_layer, ""),
}


def told_of(habit):
    ps = state(pp=2)
    model = stages(ps)
    shard = DataParallel({ps.index("pp"): model}, ps)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2, grad_sync=shard)
    optimizer = ShardedSGD(shard, OptimizerConfig(optimizer="sgd", lr=0.01, momentum=0.0, clip_grad=0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            pipeline.step(batch(step), loss)
            HABITS[habit][0]([p.grad for p in model.parameters()], model, step)
            optimizer.step(num_tokens=1)
            optimizer.zero_grad()
    return [str(w.message) for w in caught if str(w.message).startswith("gradients were")]


@pytest.mark.parametrize("habit", HABITS)
def test_numbers_of_one_stage(ranks, habit):
    for messages in ranks(told_of, habit):
        messages = [message for message in messages if "reduced by hand" not in message]
        if expected := HABITS[habit][1]:
            assert len(messages) == 1
            assert expected in messages[0]
        else:
            assert messages == []


def said_of_a_frozen_stage():
    """All gradients are halved; the first stage has none until it is thawed."""
    ps = state(pp=2)
    model = stages(ps)
    pipeline = Pipeline([model], ps=ps, num_microbatches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            model.requires_grad_(ps.index("pp") == 1 or step > 1)
            pipeline.step(batch(step), loss)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    return [str(w.message) for w in caught]


def test_a_stage_without_gradients_scales_none(ranks):
    assert ranks(said_of_a_frozen_stage, world=2) == [[], []]
