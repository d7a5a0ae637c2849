"""A module of a program's own, built of parallel layers as docs/from_pytorch.md says, beside the same one whole."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import ParallelState
from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear, full_tensor
from tests.states import state
from tests.zoo.case import compared

VOCAB, H, HEADS, FFN, STEPS, LR = 48, 16, 4, 32, 3, 0.05
ONE, TWO = "1 rank", "2 ranks"
LAYOUTS = {ONE: 1, TWO: 2}
# the feed-forward part in a layer of a GPTModel
IN_LAYER = "2 ranks, in a layer"


class Attention(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.qkv = ColumnParallelLinear(H, (3, H), split_dim=1, place=place)
        self.out = RowParallelLinear(H, H, place=place)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, H // HEADS).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feedforward(nn.Module):
    """`between(y)`: what a program does between the two linears."""

    def __init__(self, place, between=F.gelu, width=FFN, **column):
        super().__init__()
        self.up = ColumnParallelLinear(H, width, place=place, **column)
        self.down = RowParallelLinear(FFN, H, place=place)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


class Model(nn.Module):
    def __init__(self, place, attention=Attention, feedforward=Feedforward, head=None):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, H)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(3))
        self.attention, self.feedforward = attention(place), feedforward(place)
        self.head = nn.Linear(H, VOCAB) if head is None else head(place)

    def forward(self, tokens):
        x = self.tokens(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.feedforward(self.norms[1](x))
        return self.head(self.norms[2](x))


def batch(seed):
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, seed=0):
    tokens, labels = batch(seed)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def train(model, optimizer=None, between=lambda model: None, loss=loss_of, steps=STEPS):
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        loss(model, step).backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()


def built(ps, make=Model, seed=1, **parts):
    torch.manual_seed(seed)
    return make(Placement.of(ps), **parts)


def in_layer(ps, feedforward):
    config = llama_config(num_layers=1, hidden_size=H, num_attention_heads=HEADS, params_dtype=torch.float64)
    spec = replace(llama_spec(), mlp=lambda build: feedforward(build.place))
    torch.manual_seed(1)
    return GPTModel(config, spec, VOCAB, 8, parallel=ps, seed=1, parallel_output=False)


def states():
    world = dist.get_world_size() if dist.is_initialized() else 1
    return state(tp=world), ParallelState.single("cpu")


def whole_weights(model, ps):
    return {name: full_tensor(p, parallel=ps).detach() for name, p in model.named_parameters()}


def weights(program, make=Model, **parts):
    """A case: `program(model)` leaves the same weights, split or not. It may return another model."""

    def run(variation):
        found = []
        for ps in states():
            model = in_layer(ps, **parts) if variation == IN_LAYER else built(ps, make, **parts)
            found.append(whole_weights(program(model) or model, ps))
        return compared(*found)

    run.is_feedforward = make is Model and program is train and parts.keys() == {"feedforward"}
    return run


def tensor_rank():
    """0 where the model is whole."""
    return dist.get_rank() if dist.is_initialized() else 0
