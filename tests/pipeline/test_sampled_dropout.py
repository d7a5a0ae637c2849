"""Executors without gradients and dropout: off in them, drawn anew where a program leaves it on, told where meant."""

import warnings

import pytest
import torch
from torch import nn

from core.pipeline import Pipeline, SingleStage
from tests.states import state

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TOLD = "forward and evaluate are in eval mode whatever mode the model is in"


def made(pp):
    """(module of this rank, executor) of two layers with dropout."""
    ps = state(pp=pp)
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.Dropout(0.5)) for _ in range(2)]
    if pp == 1:
        whole = nn.Sequential(*parts)
        return whole, SingleStage(whole, ps=ps, num_microbatches=2)
    mine = parts[ps.index("pp")]
    return mine, Pipeline([mine], ps=ps, schedule="1f1b", num_microbatches=2)


def outputs(module, executor, count=3):
    found = []
    for _ in range(count):
        y = executor.from_last_stage(
            y if (y := executor.forward(X)) is not None else torch.empty(4, 6, dtype=torch.float64)
        )
        result = executor.evaluate(X, lambda y, part: (y.sum(), len(y)))
        found.append((y, float(result.loss_sum)))
    return found


def left_on(pp):
    """As MC dropout has it: the model in eval mode, its dropouts in train mode."""
    all_found = []
    for _ in range(2):
        module, executor = made(pp)
        module.eval()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.train()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            all_found.append(outputs(module, executor))
    one, other = all_found
    for (y, loss), (same_y, same_loss) in zip(one, other, strict=True):
        assert torch.equal(y, same_y) and loss == same_loss, "a function of the seed and the call"
    assert len({loss for _, loss in one}) == 3
    assert not torch.equal(one[0][0], one[1][0])
    assert abs(float(y.sum()) - loss) > 1e-3, "evaluate draws others than forward before it"


@pytest.mark.parametrize("pp", [1, 2])
def test_dropout_that_is_left_on_draws_anew(ranks, pp):
    ranks(left_on, pp, world=pp)


def in_train_mode(pp):
    module, executor = made(pp)
    executor.forward(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.forward(X.clone())
    with pytest.warns(UserWarning, match=TOLD):
        executor.forward(X)
        executor.forward(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outputs(module, executor)
        assert all(torch.equal(y, found[0][0]) and loss == found[0][1] for y, loss in found)
        # nothing to sample
        for part in module.modules():
            part.p = 0.0
        made_again, executor = made(pp)
        made_again.eval()
        outputs(made_again, executor)
    assert module.training


@pytest.mark.parametrize("pp", [1, 2])
def test_one_batch_again_in_train_mode_is_told(ranks, pp):
    ranks(in_train_mode, pp, world=pp)


def with_statistics(pp, train):
    ps = state(pp=pp)
    module = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64)).train(train)
    if pp == 1:
        executor = SingleStage(module, ps=ps, num_microbatches=2)
    else:
        executor = Pipeline([module], ps=ps, schedule="1f1b", num_microbatches=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            executor.forward(X)
            executor.evaluate(X, lambda y, part: (y.sum(), len(y)))
    assert not module[1].num_batches_tracked
    return [str(one.message) for one in told]


@pytest.mark.parametrize("pp", [1, 2])
def test_running_statistics_are_not_made_by_forward(ranks, pp):
    for told in ranks(with_statistics, pp, True, world=pp):
        assert len(told) == 1 and "running statistics of BatchNorm1d are used and not updated" in told[0]
    assert not any(ranks(with_statistics, pp, False, world=pp))
