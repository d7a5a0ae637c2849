"""A tiny model with every kind of use of a weight, and its plain twin."""

import torch
import torch.nn.functional as F
from torch import nn

from core.autograd import StageContext, WeightGradBag, deferred_embedding, deferred_linear

VOCAB, HIDDEN, TOKENS = 11, 6, (3, 4)
SEED, STEP = 7, 3
THUNKS = 8  # embedding, features, wide, narrow, square twice, tied head, bare; nothing for frozen or norm


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def stage_dropout(x, stage, site, p=0.3):
    """A mask that is a function of (seed, step, microbatch, site)."""
    mixed = hash((stage.seed, stage.step, stage.microbatch, site)) % 2**32
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(mixed), dtype=x.dtype) >= p
    return x * keep / (1 - p)


class Tiny(nn.Module):
    def __init__(self, stage, plain=False):
        super().__init__()
        self.stage, self.plain = stage, plain
        self.table = parameter(VOCAB, HIDDEN)
        self.features = parameter(HIDDEN, 5)
        self.wide, self.wide_bias = parameter(2, 2, 3, HIDDEN), parameter(2, 2, 3)
        self.narrow = parameter(2, 3, 12)
        self.square, self.square_bias = parameter(HIDDEN, HIDDEN), parameter(HIDDEN)
        self.bare = parameter(HIDDEN, HIDDEN)
        self.frozen = parameter(HIDDEN, HIDDEN).requires_grad_(False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.unused = parameter(2)

    def linear(self, x, weight, bias=None):
        if self.plain:
            return F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
        return deferred_linear(x, weight, bias, stage=self.stage)

    def forward(self, ids, features):
        """-> logits. `features` need no gradient."""
        x = F.embedding(ids, self.table) if self.plain else deferred_embedding(ids, self.table, stage=self.stage)
        x = stage_dropout(x + self.linear(features, self.features), self.stage, 0)
        x = x + self.linear(F.gelu(self.linear(self.norm(x), self.wide, self.wide_bias)), self.narrow)
        x = self.linear(F.gelu(self.linear(x, self.square, self.square_bias)), self.square, self.square_bias)
        x = stage_dropout(x, self.stage, 1) + self.linear(self.linear(x, self.frozen), self.bare)
        return self.linear(x, self.table)


def twins(main_grads=False):
    """The deferring model and the plain one, with equal weights."""
    ours, plain = Tiny(StageContext()), Tiny(StageContext(), plain=True)
    plain.load_state_dict(ours.state_dict())
    if main_grads:
        for p in ours.parameters():
            if p.requires_grad:
                p.main_grad = torch.zeros_like(p)
    return ours, plain


def batch(microbatch):
    generator = torch.Generator().manual_seed(100 + microbatch)
    ids = torch.randint(VOCAB, TOKENS, generator=generator)
    return ids, torch.randn(*TOKENS, 5, generator=generator), torch.randint(VOCAB, TOKENS, generator=generator)


def forward(model, microbatch, bag=None):
    """F of one microbatch: its loss."""
    ids, features, target = batch(microbatch)
    model.stage.begin(seed=SEED, step=STEP, microbatch=microbatch, bag=bag)
    return F.cross_entropy(model(ids, features).flatten(0, 1), target.flatten())


def reference(plain, microbatches):
    """Gradients of the plain twin, summed over the microbatches."""
    for m in microbatches:
        forward(plain, m).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def bags(count):
    return [WeightGradBag() for _ in range(count)]


def close(ours, theirs, tolerance=1e-12):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if theirs.numel():
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())
