"""Balancing losses of a program's own experts over context ranks, of a rank's own rows and of all."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce

from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import context_batch
from tests.states import state

S, H, EXPERTS = 16, 16, 4


class Scaled(torch.autograd.Function):
    """DeepSeek's way: the loss takes no part in the output, and gets the gradient 1."""

    @staticmethod
    def forward(ctx, x, aux):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones(())


def whole(x, group):
    return all_reduce(x, group=group.process_group) / group.size


def switch(part, p, top, group):
    part.aux = (F.one_hot(top, EXPERTS).double().mean(0) * p.mean(0)).sum()


def matched(part, p, top, group):
    part.aux = torch.sum(F.one_hot(p.argmax(-1), EXPERTS).double().mean(dim=0) * p.mean(dim=0))


def in_output(part, p, top, group):
    part.scale = (F.one_hot(top, EXPERTS).double().mean(0) * p.mean(0)).sum()


def counted(part, p, top, group):
    counts = torch.bincount(top.flatten(), minlength=EXPERTS).double()
    part.bias += 0.01 * torch.sign(counts.mean() - counts)


def counted_by_all(part, p, top, group):
    counts = torch.bincount(top.flatten(), minlength=EXPERTS)
    dist.all_reduce(counts, group=group.process_group)
    part.bias += 0.01 * torch.sign(counts.double().mean() - counts)


def switch_of_all(part, p, top, group):
    part.aux = (whole(F.one_hot(top, EXPERTS).double().mean(0), group) * whole(p.mean(0), group)).sum()


def logits_squared(part, p, top, group):
    part.aux = p.log().logsumexp(-1).square().mean()


class Experts(nn.Module):
    balance = staticmethod(switch)

    def __init__(self, build):
        super().__init__()
        self.router, self.down = nn.Linear(H, EXPERTS).double(), nn.Linear(H, H).double()
        self.register_buffer("bias", torch.zeros(EXPERTS).double())
        self.group, self.scale = build.parallel.group("cp"), None

    def forward(self, x):
        p = self.router(x.reshape(-1, H)).softmax(-1)
        top = (p + self.bias).topk(2, -1).indices
        with torch.set_grad_enabled(type(self).balance not in (counted, counted_by_all)):
            type(self).balance(self, p, top[:, 0] if type(self).balance is switch else top.flatten(), self.group)
        y = self.down(x) * p.amax(-1).view(*x.shape[:2], 1)
        return y if self.scale is None else Scaled.apply(y, self.scale)


def said(balance):
    ps = state(cp=2)
    mlp = type("Balanced", (Experts,), {"balance": staticmethod(balance)})
    config = llama_config(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype=torch.float64)
    model = GPTModel(config, replace(llama_spec(), mlp=mlp), 40, S, parallel=ps)
    tokens = torch.randint(40, (2, S + 1), generator=torch.Generator().manual_seed(0))
    given = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": torch.arange(S).expand(2, -1)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            losses = model(**context_batch(given, ps))
            (losses.mean() + sum(getattr(m, "aux", 0.0) for m in model.modules())).backward()
    return [str(w.message) for w in found if "deprecated" not in str(w.message)]


@pytest.mark.parametrize("balance", [switch, matched, in_output, counted], ids=lambda f: f.__name__)
def test_of_a_rank_s_own_rows(ranks, balance):
    for messages in ranks(said, balance, world=2):
        assert len(messages) == 1 and "looks along the sequence" in messages[0]


@pytest.mark.parametrize("balance", [switch_of_all, counted_by_all, logits_squared], ids=lambda f: f.__name__)
def test_of_all_rows(ranks, balance):
    assert ranks(said, balance, world=2) == [[], []]
