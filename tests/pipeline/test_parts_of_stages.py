"""Norms of some of a model's gradients over a pipeline, and weights of one stage that another has as well."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import clip_grad_norm_, get_grad_norm
from core.pipeline import Pipeline
from tests.models.gpt import gpt
from tests.states import state


class Stage(nn.Module):
    """Two layers; the first stage has a matrix of its own before them."""

    def __init__(self, number):
        super().__init__()
        self.before = nn.Linear(4, 4) if number == 0 else None
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, input):
        x = self.before(input) if self.before is not None else input
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def batch(seed=0):
    return {"input": torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}


def loss(output, part):
    return output.square().sum(), output.numel()


def stepped(zero_stage=0):
    """(this rank's stage with its means of gradients, the whole model with its)."""
    ps = state(pp=2)
    torch.manual_seed(3)
    whole = [Stage(number).double() for number in range(2)]
    torch.manual_seed(3)
    mine = [Stage(number).double() for number in range(2)][ps.index("pp")]
    output = whole[1](whole[0](batch()["input"]))
    output.square().mean().backward()
    shard = DataParallel({ps.index("pp"): mine}, ps, zero_stage=zero_stage)
    pipeline = Pipeline({ps.index("pp"): mine}, ps=ps, num_microbatches=2, grad_sync=shard)
    tokens = pipeline.step(batch(), loss).num_tokens
    for p in mine.parameters():
        p.grad.div_(tokens)
    return mine, whole, pipeline, ps


def clipped_by_layer(ours):
    """Norms of each layer's gradients after they were clipped to 0.01, and what was said."""
    mine, _, pipeline, _ = stepped()
    clip = clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
    with warnings.catch_warnings(record=True, action="always") as caught:
        for layer in mine.layers:
            clip(layer.parameters(), 0.01)
    norms = [float(nn.utils.get_total_norm([p.grad for p in layer.parameters()])) for layer in mine.layers]
    pipeline.close()
    return norms, [str(w.message) for w in caught]


def test_clipping_layer_by_layer_with_the_models_norm_is_told(ranks):
    for norms, said in ranks(clipped_by_layer, True, world=2):
        assert all(norm < 0.0099 for norm in norms), "the norm of two layers, of which each stage has one"
        told = [text for text in said if "one layer of each of 2 pipeline stages" in text]
        assert len(told) == 2 and "torch.nn.utils.clip_grad_norm_" in told[0], said


def test_clipping_layer_by_layer_with_torchs_is_right(ranks):
    for norms, _ in ranks(clipped_by_layer, False, world=2):
        assert norms == pytest.approx([0.01, 0.01], rel=1e-4)


def norms_of_some(zero_stage):
    """Of the matrix that one stage has, and of all; said."""
    mine, whole, pipeline, ps = stepped(zero_stage)
    of_first = [] if mine.before is None else mine.before.parameters()
    of_whole = [p for stage in whole for p in stage.parameters()]
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = [get_grad_norm(part, parallel=ps) for part in (of_first, mine, [])]
    wanted = [nn.utils.get_total_norm([p.grad for p in part]) for part in (whole[0].before.parameters(), of_whole)]
    pipeline.close()
    torch.testing.assert_close(torch.stack(found), torch.stack([*wanted, torch.zeros_like(wanted[0])]))
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_stage_that_has_none_of_the_parameters_takes_part(ranks, zero_stage):
    """It used to wait with other messages than the rest, until the timeout."""
    assert ranks(norms_of_some, zero_stage, world=4) == [[]] * 4


def said_of_equal_weights(when):
    """What four steps say where stage 1 gets the weights of stage 0."""
    ps = state(pp=2)
    torch.manual_seed(5 + ps.index("pp"))
    mine = nn.Linear(4, 4).double()
    pipeline = Pipeline({ps.index("pp"): mine}, ps=ps, num_microbatches=2)
    said = []
    for step in range(4):
        if step == when:
            torch.manual_seed(7)
            mine.load_state_dict(nn.Linear(4, 4).double().state_dict())
        with warnings.catch_warnings(record=True, action="always") as caught:
            pipeline.step(batch(step), loss)
        said += [str(w.message) for w in caught]
        mine.zero_grad()
    pipeline.close()
    return said


@pytest.mark.parametrize("when", [0, 2, None])
def test_one_ranks_weights_that_are_loaded_on_all_stages_are_told_once(ranks, when):
    for said in ranks(said_of_equal_weights, when, world=2):
        assert len(said) == (when is not None), said
        assert when is None or "one rank's file was loaded on all" in said[0]


def said_of_state_dict():
    model = gpt(facts={"num_layers": 2}, parallel=state(pp=2))
    with warnings.catch_warnings(record=True, action="always") as caught:
        model.sharded_state_dict()
        before = len(caught)
        model.state_dict()
        nn.ModuleList([model]).state_dict()
    return before, [str(w.message) for w in caught]


def test_a_stages_state_dict_is_told_once(ranks):
    for rank, (before, said) in enumerate(ranks(said_of_state_dict, world=2)):
        assert before == 0 and len(said) == 1 and f"pipeline rank {rank} of 2" in said[0]
