"""What a program does by hand with the weights of stages before a Pipeline is made of them."""

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.models.gpt import gpt_stages, llama_spec
from core.pipeline import Pipeline
from core.training import next_token_loss
from tests.models.gpt import VOCAB, config
from tests.states import state


def size_of(parameters):
    """A rate by the model's size."""
    return sum(p.numel() for p in parameters)


@torch.no_grad()
def norm_of(parameters):
    """Initial weights scaled to one norm."""
    total = math.sqrt(sum(p.pow(2).sum().item() for p in parameters))
    for p in parameters:
        p.mul_(20 / total)


@torch.no_grad()
def deviation_of(parameters):
    return torch.cat([p.flatten() for p in parameters]).std()


@torch.no_grad()
def by_name(parameters):
    """Initial values of each, and a look at each."""
    for p in parameters:
        (nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)).mul_(0.5)
    return {str(number): p.norm().item() for number, p in enumerate(parameters)}


def in_groups(parameters):
    matrices = [p for p in parameters if p.dim() > 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": [p for p in parameters if p.dim() < 2]}])


def memory_of(parameters):
    return sum(p.numel() * p.element_size() for p in parameters)


def copied(parameters):
    return [copy.deepcopy(p) for p in parameters], pickle.dumps([p.detach() for p in parameters])


HABITS = {
    size_of: "numel by hand of several weights",
    norm_of: "sum by hand of several weights",
    deviation_of: "std by hand of several weights",
    by_name: "",
    in_groups: "",
    copied: "",
    memory_of: "",
}


def stages(ps):
    return gpt_stages(config("llama", num_layers=4), llama_spec(), VOCAB, 8, placement=(0, 1), parallel=ps)


def heard(place, ends):
    """What is said of a habit; the classes of parameters once a pipeline, a forward or a copy has the stage."""
    ps = state(pp=2)
    mine = stages(ps)
    (model,) = mine.values()
    shard = DataParallel(mine, ps, zero_stage=1) if ends == "wrapped" else None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        [*HABITS][place](list(model.parameters()))
    assert {w.filename for w in found} <= {__file__}, "a warning is of the program's line"
    if ends == "a forward":
        x = torch.zeros(4, 2, 32, dtype=torch.float64)
        model(torch.zeros(2, 4, dtype=torch.int64) if model.pre_process else x)
        assert model.before_pipeline is None
    elif ends == "a copy":
        model = copy.deepcopy(model)
        assert model.before_pipeline is None
    else:
        Pipeline(mine, ps=ps, schedule="1f1b", num_microbatches=2, grad_sync=shard).close()
        assert model.before_pipeline is None
        return [str(w.message) for w in found], set()
    return [str(w.message) for w in found], {type(p) for p in model.parameters()}


@pytest.mark.parametrize("ends", ["a pipeline", "wrapped", "a forward", "a copy"])
@pytest.mark.parametrize("place", range(len(HABITS)))
def test_what_is_made_of_the_weights_of_a_stage(ranks, place, ends):
    says = [*HABITS.values()][place]
    for messages, classes in ranks(heard, place, ends, world=2):
        assert len(messages) == bool(says) and all(x.startswith(says) for x in messages)
        assert classes <= {nn.Parameter}


def test_one_rank_has_all_stages(single):
    (model,) = gpt_stages(config("llama"), llama_spec(), VOCAB, 8, placement=(0,), parallel=single).values()
    assert model.before_pipeline is None and {type(p) for p in model.parameters()} == {nn.Parameter}


def freed():
    """Whether a stage that nobody has is gone, before and after a forward."""
    gone = []
    gc.collect()
    gc.disable()
    for runs in (False, True):
        (model,) = stages(state(pp=2)).values()
        if runs:
            model(torch.zeros(2, 4, dtype=torch.int64) if model.pre_process else torch.zeros(4, 2, 32).double())
        references = [weakref.ref(model), weakref.ref(next(model.parameters()))]
        del model
        gone += [reference() is None for reference in references]
    gc.enable()
    return gone


def test_a_stage_that_nobody_has_is_freed(ranks):
    assert ranks(freed, world=2) == [[True] * 4] * 2


def told_twice():
    mine = stages(state(pp=2))
    parameters = [*next(iter(mine.values())).parameters()]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        size_of(parameters)
        pipeline = Pipeline(mine, ps=state(pp=2), schedule="1f1b", num_microbatches=2)
        size_of(parameters)
        # another kind is heard
        deviation_of(parameters)
    pipeline.close()
    return [w.filename for w in found]


def test_each_kind_is_told_once_and_of_the_line_of_the_program(ranks):
    assert ranks(told_twice, world=2) == [[__file__] * 2] * 2


def steps():
    """Weights after an update, of a stage that was looked at before: as they would be without."""
    found = []
    for looks in (False, True):
        ps = state(pp=2)
        mine = stages(ps)
        (model,) = mine.values()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            size = size_of(model.parameters()) if looks else 0
        assert size == sum(p.numel() for p in model.parameters()) * looks
        pipeline = Pipeline(mine, ps=ps, schedule="1f1b", num_microbatches=2)
        tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline.step({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, next_token_loss)
        optimizer.step()
        pipeline.close()
        found.append([p.detach().clone() for p in model.parameters()])
    return all(map(torch.equal, *found))


def test_numbers_are_the_same(ranks):
    assert ranks(steps, world=2) == [True, True]
