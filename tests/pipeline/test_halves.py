"""Rows that a loss pairs: partners that were cut into other microbatches are told."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from tests.states import state

ROWS = 8


def of_pair(chosen, rejected):
    return -F.logsigmoid(chosen - rejected).sum()


def scores(output, microbatch):
    """A number for each row, as the probability of a sequence is."""
    return (output * microbatch["y"]).sum(-1)


def paired(take):
    return lambda output, microbatch: of_pair(*take(scores(output, microbatch)))


def by_view(x):
    return x.view(2, -1)


def pairs_by_view(x):
    return x.view(-1, 2).unbind(1)


def in_chunks(output, microbatch):
    """Of tokens, to save memory."""
    flat = output.reshape(-1)
    return sum(piece.square().sum() for piece in flat.chunk(2))


def of_columns(output, microbatch):
    left, right = output.chunk(2, dim=-1)
    return (left * right).sum()


def squeezed(output, microbatch):
    """By functions without arguments, and with names alone."""
    return torch.square(input=output[:, None].squeeze().unsqueeze(dim=1).contiguous()).sum()


def with_first(output, microbatch):
    """A row is printed."""
    assert str(output[0].tolist())
    return output.square().sum()


LOSSES = {
    "chunk": paired(lambda x: x.chunk(2)),
    "split": paired(lambda x: x.split(len(x) // 2)),
    "slices": paired(lambda x: (x[: len(x) // 2], x[len(x) // 2 :])),
    "narrow": paired(lambda x: (x.narrow(0, 0, len(x) // 2), x.narrow(0, len(x) // 2, len(x) // 2))),
    "view": paired(by_view),
    "reshape": paired(lambda x: x.reshape([2, -1])),
    "targets": lambda output, microbatch: (output * torch.cat(microbatch["y"].chunk(2)[::-1])).sum(),
    "neighbours": paired(lambda x: (x[0::2], x[1::2])),
    "neighbours by view": paired(pairs_by_view),
    "columns": of_columns,
    "tokens": in_chunks,
    "first": with_first,
    "squeezed": squeezed,
    "sums": lambda output, microbatch: scores(output, microbatch).sum(),
}
TOLD = {"chunk", "split", "slices", "narrow", "view", "reshape", "targets"}


def batch():
    draw = torch.Generator().manual_seed(3)
    return {name: torch.rand(ROWS, 4, generator=draw) for name in ("input", "y")}


def heard(executor, name):
    def loss_fn(output, microbatch):
        return LOSSES[name](output, microbatch), 1

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = executor.step(batch(), loss_fn)
        executor.step(batch(), loss_fn)
    assert type(result.loss) is torch.Tensor
    return [str(w.message) for w in found if "halves of a microbatch's rows" in str(w.message)]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_halves_of_a_microbatch_are_no_halves_of_the_batch(name, microbatches):
    torch.manual_seed(0)
    executor = SingleStage(nn.Linear(4, 4), ps=ParallelState.single("cpu"), num_microbatches=microbatches)
    messages = heard(executor, name)
    assert len(messages) == (name in TOLD and microbatches > 1)
    assert not messages or ("into 2 microbatches" in messages[0] and "output[0::2]" in messages[0])


def on_two_stages(name):
    ps = state(pp=2)
    torch.manual_seed(ps.index("pp"))
    pipeline = Pipeline([nn.Linear(4, 4)], ps=ps, num_microbatches=2)
    messages = heard(pipeline, name)
    pipeline.close()
    return len(messages)


@pytest.mark.parametrize("name", ["slices", "neighbours"])
def test_the_last_stage_says_so(ranks, name):
    assert ranks(on_two_stages, name, world=2) == [0, int(name in TOLD)]


def test_what_it_says_is_true():
    """Pairs of neighbours give the same weights however the batch is cut, and halves do not."""
    gradients = {}
    for name in ("slices", "neighbours"):
        for microbatches in (1, 2):
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                heard(SingleStage(model, ps=ParallelState.single("cpu"), num_microbatches=microbatches), name)
            gradients[name, microbatches] = model.weight.grad
    assert torch.allclose(gradients["neighbours", 1], gradients["neighbours", 2])
    assert not torch.allclose(gradients["slices", 1], gradients["slices", 2])
