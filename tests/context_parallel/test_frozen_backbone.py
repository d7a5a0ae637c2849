"""A head of the program's own on a frozen model whose sequences lie over context ranks (probes, Medusa's heads)."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from core.data_parallel import DataParallel
from core.parallel_state import ParallelState, context_batch
from tests.models.gpt import VOCAB, gpt
from tests.states import state

S, IGNORED = 16, -100


class Heads(nn.Module):
    """Two heads on the hidden states [s/cp, b, h]."""

    def __init__(self, model, without_grad):
        super().__init__()
        self.model, self.without_grad = model.requires_grad_(False), without_grad
        torch.manual_seed(2)
        width = model.config.hidden_size
        self.heads = nn.ModuleList(nn.Linear(width, VOCAB, dtype=torch.float64) for _ in range(2))

    def forward(self, tokens, position_ids):
        with torch.set_grad_enabled(not self.without_grad):
            hidden = self.model(tokens, position_ids).transpose(0, 1)
        return [head(hidden) for head in self.heads]


def batch(step, ps):
    tokens, labels = torch.randint(VOCAB, (2, 2, S), generator=torch.Generator().manual_seed(step))
    labels[0, :12] = IGNORED
    given = {"tokens": tokens, "labels": labels, "position_ids": torch.arange(S).expand(2, -1)}
    return context_batch(given, ps)


def loss_of(logits, labels, counts_all):
    if not counts_all:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    number = (labels != IGNORED).sum()
    dist.all_reduce(number)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / number * dist.get_world_size()


def trained(ps, without_grad, counts_all, steps=3):
    torch.manual_seed(1)
    model = Heads(gpt("llama", parallel=ps, post_process=False), without_grad)
    if ps.size("cp") > 1:
        DataParallel(model, ps)
    optimizer = torch.optim.SGD(model.heads.parameters(), lr=0.5)
    for step in range(steps):
        rows = batch(step, ps)
        outputs = model(rows["tokens"], rows["position_ids"])
        sum(loss_of(logits, rows["labels"], counts_all and ps.size("cp") > 1) for logits in outputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.heads.parameters()]


def compared(without_grad, counts_all):
    """The largest difference from one process, and what was told."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(state(cp=2), without_grad, counts_all)
    alone = trained(ParallelState.single("cpu"), without_grad, False)
    off = max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))
    return off, [str(one.message) for one in told if "context parallelism" in str(one.message)]


@pytest.mark.parametrize("without_grad", [False, True])
def test_a_mean_over_a_ranks_own_labels_is_told(ranks, without_grad):
    for off, told in ranks(compared, without_grad, False, world=2):
        assert off > 1e-4, "one process weighs the tokens otherwise"
        assert len(told) == 1 and "counts otherwise than the same sum of another" in told[0]


@pytest.mark.parametrize("without_grad", [False, True])
def test_a_mean_over_the_labels_of_all_ranks_is_right_and_nothing_is_told(ranks, without_grad):
    for off, told in ranks(compared, without_grad, True, world=2):
        assert off < 1e-12 and told == []
