"""Dropout on tensor ranks: other masks where ranks hold other elements, the same where tensors are replicated."""

import pytest
import torch

from core.autograd import StageContext
from core.parallel_state.collectives import all_gather_objects
from core.transformer.attention.self_attention import CoreAttention
from core.transformer.dropout import Dropout, residual_dropout
from core.transformer.spec import Build
from tests.models.gpt import batch, config, gpt
from tests.parity.whole import whole_gradients
from tests.states import state


def masks(sp):
    """What one site of each kind makes of the same input on every rank."""
    build = Build(config(dropout=0.5), state(tp=2, sp=sp), StageContext(), layer=1)
    x = torch.ones(16, 16)
    heads = torch.eye(16).expand(2, 4, 16, 16)  # as v: the output is the matrix of dropped probabilities
    return {
        "sharded": Dropout(build, 0.5, "site", sharded=True)(x),
        "replicated": Dropout(build, 0.5, "site", sharded=False)(x),
        "residual": residual_dropout(build, "site")(x),
        "attention": CoreAttention(build)(torch.zeros_like(heads), torch.zeros_like(heads), heads),
    }


@pytest.mark.parametrize("sp", [False, True])
def test_masks_differ_where_ranks_hold_other_elements(ranks, sp):
    first, second = ranks(masks, sp, world=2)
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == ({"replicated"} if sp else {"replicated", "residual"})


def plain_use_seeded_differently(sp):
    """Loss and gradients of a plain forward and backward; `whole_gradients` compares replicas bit for bit."""
    ps = state(tp=2, sp=sp)
    torch.manual_seed(100 + ps.rank)
    model, (tokens, labels) = gpt("gpt2", parallel=ps, facts={"dropout": 0.3}, seed=1), batch()
    loss = model(tokens, labels=labels)
    loss.sum().backward()
    whole_gradients(model, ps)
    again = model(tokens, labels=labels)
    assert not torch.equal(loss, again), "every forward draws anew"
    return all_gather_objects(loss.detach().tolist(), ps.world)


@pytest.mark.parametrize("sp", [False, True])
def test_plain_use_agrees_though_the_ranks_generators_do_not(ranks, sp):
    for found in ranks(plain_use_seeded_differently, sp, world=2):
        assert found[0] == found[1]
