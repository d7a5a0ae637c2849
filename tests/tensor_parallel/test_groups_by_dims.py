"""Optimizer groups that a program makes by numbers of dims: what is left out, and what decays, is told."""

import warnings

import pytest
import torch

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear
from tests.models.gpt import VOCAB, gpt
from tests.states import state


def steps(optimizers, model, count=3):
    """What is said in some steps."""
    tokens = torch.arange(16).view(2, 8) % VOCAB
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            model(tokens, labels=tokens).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in told if "dims" in str(w.message)]


def test_weights_that_no_group_takes_are_told():
    model = gpt()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    (message,) = steps([torch.optim.Adam(matrices), torch.optim.SGD(vectors, lr=0.1)], model)
    assert "no optimizer holds" in message and "linear_qkv.weight of 4 dims" in message


@pytest.mark.parametrize("choice", ["all", "by name", "frozen", "a few"])
def test_others_are_silent(choice):
    model = gpt()
    names = dict(model.named_parameters())
    if choice == "frozen":
        for p in names.values():
            p.requires_grad_(p.ndim == 2)
    chosen = {
        "all": list(names.values()),
        "by name": [p for name, p in names.items() if "norm" not in name],
        "frozen": [p for p in names.values() if p.requires_grad],
        # on purpose: other matrices stay as they are, too
        "a few": [p for name, p in names.items() if "linear_proj" in name],
    }
    assert steps([torch.optim.SGD(chosen[choice], lr=0.1)], model) == []


def nanogpt_groups(model):
    named = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("is_ours", [False, True])
def test_biases_that_decay_for_their_dims_are_told(is_ours):
    model = gpt()
    if is_ours:
        shard = DataParallel(model, state())
        optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-3), groups=nanogpt_groups(model))
    else:
        optimizer = torch.optim.AdamW(nanogpt_groups(model))
    (message,) = steps([optimizer], model)
    assert "weight_decay=0.1 is of" in message and "linear_qkv.bias of 3 dims" in message


def test_a_bias_of_ones_own_module_that_decays_for_its_dims_is_told(single):
    place = Placement.of(single)
    model = torch.nn.Sequential(
        ColumnParallelLinear(8, (3, 8), split_dim=1, place=place),
        RowParallelLinear(24, 8, place=place),
        ColumnParallelLinear(8, (2, 8), split_dim=1, place=place),
    )
    optimizer = torch.optim.AdamW(nanogpt_groups(model))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    (message,) = [str(w.message) for w in told]
    assert "weight_decay=0.1 is of the bias [3, 8]" in message and "endswith('bias')" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = ColumnParallelLinear(8, (3, 8), split_dim=1, place=place)
        fresh(torch.ones(2, 8)).sum().backward()
        torch.optim.AdamW(fresh.parameters()).step()


def test_biases_that_are_spared_by_name_are_silent():
    model = gpt()
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight") and p.dim() >= 2]
    ids = {id(p) for p in decayed}
    groups = [{"params": decayed}, {"params": [p for p in named.values() if id(p) not in ids], "weight_decay": 0.0}]
    assert steps([torch.optim.AdamW(groups)], model) == []
    assert steps([torch.optim.AdamW(model.parameters())], model) == [], "all decay alike"
