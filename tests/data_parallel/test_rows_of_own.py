"""A model of a program's own on context ranks, whose attention would see a rank's rows alone."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from core.data_parallel import DataParallel, DistributedDataParallel
from core.parallel_state import context_batch
from core.parallel_state.layout import Layout, set_layout
from core.training.model.own import _tell_of_fp8, _tell_of_unsplit, refuse_own_rows
from tests.states import state

VOCAB, S = 32, 8


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 24), nn.Linear(8, VOCAB)

    def forward(self, tokens):
        return self.head(self.mix(self.tokens(tokens)))

    def mix(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True)


class ByHand(Attends):
    def mix(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class Recurrent(Attends):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def mix(self, x):
        return self.gru(x)[0] + self.qkv(x).sum()


class Encoder(Attends):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)

    def mix(self, x):
        return self.layer(x) + self.qkv(x).sum()


class Compiled(Attends):
    def __init__(self):
        super().__init__()
        self.attention = Mixes()
        self.attention.compile(backend="eager")

    def mix(self, x):
        return self.attention(self.qkv(x))


class Mixes(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(*x.chunk(3, -1), is_causal=True)


class ByToken(Attends):
    def mix(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k.softmax(-1) + v


class Knows(Attends):
    knows_context = True


def told(make, wrap):
    torch.manual_seed(1)
    ps = state(cp=2)
    tokens = torch.randint(VOCAB, (2, S))
    rows = context_batch({"tokens": tokens, "labels": tokens.roll(-1, 1)}, ps)
    model = make()
    wrapped = DistributedDataParallel(model, parallel=ps) if wrap is DistributedDataParallel else model
    if wrap is DataParallel:
        DataParallel(model, ps, zero_stage=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            F.cross_entropy(wrapped(rows["tokens"]).flatten(0, 1), rows["labels"].flatten()).backward()
    return [
        str(w.message) for w in caught if "in a model of your own is given a context rank's rows" in str(w.message)
    ]


@pytest.mark.parametrize("wrap", [DataParallel, DistributedDataParallel])
@pytest.mark.parametrize("make", [Attends, ByHand, Recurrent, Encoder, Compiled])
def test_what_meets_other_rows_is_told_once(ranks, make, wrap):
    for messages in ranks(told, make, wrap, world=2):
        assert len(messages) == 1
        assert "knows_context = True" in messages[0]


@pytest.mark.parametrize("make", [ByToken, Knows])
def test_what_is_right_hears_nothing(ranks, make):
    assert ranks(told, make, DataParallel, world=2) == [[], []]


def test_a_run_refuses_it():
    two = SimpleNamespace(size=lambda axis: 2)
    with pytest.raises(ValueError, match=r"Attends does not say that it knows parallel.context=2 ranks"):
        refuse_own_rows(Attends(), "model.build=mine:build", two)
    refuse_own_rows(Knows(), "model.build=mine:build", two)
    refuse_own_rows(Attends(), "model.build=mine:build", SimpleNamespace(size=lambda axis: 1))


def test_a_run_tells_of_tensor_ranks_that_share_nothing():
    two = SimpleNamespace(size=lambda axis: 2)
    with pytest.warns(UserWarning, match=r"none of its 5 parameters here is split over parallel.tensor=2 ranks"):
        _tell_of_unsplit({0: Attends()}, "model.build=mine:build", two)
    split = Attends()
    set_layout(split.head.weight, Layout((2 * VOCAB, 8), {"tp": 0}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tell_of_unsplit({0: split}, "model.build=mine:build", two)
        _tell_of_unsplit({0: Attends()}, "model.build=mine:build", SimpleNamespace(size=lambda axis: 1))


def test_a_run_tells_of_fp8_that_nothing_computes_in():
    with pytest.warns(UserWarning, match=r"model\.fp8=hybrid: 0 of the 4 modules of model\.build=mine:build"):
        _tell_of_fp8({0: Attends()}, "mine:build", "hybrid")
    computes = Attends()
    computes.head.fp8 = object()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tell_of_fp8({0: computes}, "mine:build", "hybrid")
        _tell_of_fp8({0: Attends()}, "mine:build", None)
