"""What programs do by hand with weights that are split: before the first forward, and in any step."""

import math

import torch
from torch import nn

from tests.models.gpt import batch
from tests.zoo.case import Case
from tests.zoo.split_model import LR, SEQUENCE, STEPS, gradients, loss_of, sgd, train, weights
from tests.zoo.tools_by_hand import NORM, matrices, told

OUTPUT_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")


def initialized(fill):
    """`fill` of the weights that nanoGPT scales by depth, before the first forward; then a loop."""

    def program(model):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            for name, p in model.named_parameters():
                if name.endswith(OUTPUT_WEIGHTS):
                    fill(p)
        train(model)

    return weights(program)


def steps_of(update):
    """Eight steps of SGD; `update(model, step)` before the optimizer's."""

    def program(model):
        optimizer = sgd(model)
        for step in range(8):
            loss_of(model, step).backward()
            update(model, step)
            optimizer.step()
            optimizer.zero_grad()

    return weights(program)


def trust_ratio_in_step_six(model, step):
    if step == 5:
        for p in matrices(model):
            p.grad.mul_(p.detach().norm())


def scaled_by_width(model):
    """muP: a rate of each matrix's own, by its fan-in."""
    groups = [{"params": [p], "lr": LR / p.shape[-1] if p.dim() > 1 else LR} for p in model.parameters()]
    train(model, torch.optim.SGD(groups))


def decayed_by_size(model):
    """A decay of each weight's own, by how many numbers it has."""

    def decay():
        with torch.no_grad():
            for p in matrices(model):
                p.mul_(1 - 0.1 / p.numel())

    train(model, between=decay)


def noise_of_shape(model):
    def add_noise():
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(3)
            for p in matrices(model):
                p.add_(1e-3 * torch.randn(p.shape, dtype=p.dtype))

    train(model, between=add_noise)


def clipped_gradients(model):
    """`torch.autograd.grad`, then one norm of each."""
    for step in range(STEPS):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, step), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= LR * g / (1 + g.norm())


def plain_gradients(model):
    for step in range(STEPS):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, step), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= LR * g


def momentum(normalized):
    """Momentum in buffers of `zeros_like`; normalized: each divided by its norm."""

    def program(model):
        buffers = [torch.zeros_like(p) for p in model.parameters()]
        for step in range(STEPS):
            loss_of(model, step).backward()
            with torch.no_grad():
                for p, buffer in zip(model.parameters(), buffers, strict=True):
                    buffer.mul_(0.9).add_(p.grad)
                    p -= LR * (buffer / buffer.norm() if normalized else buffer)
            model.zero_grad()

    return weights(program)


def loss_of_hidden_states(model):
    """Hidden states and the head by hand, and a loss over what it gives."""
    tokens, _ = batch(0)
    hidden_states = model.decoder(model.embedding(tokens, None))
    logits = model.output_layer(hidden_states, model.embedding.word_embeddings.weight if model.tied else None)
    logits.logsumexp(-1).sum().backward()


class Mixed(nn.Module):
    """A feed-forward of one's own: by token, or with a look at the token before."""

    def __init__(self, inner, looks_back):
        super().__init__()
        self.inner, self.looks_back = inner, looks_back

    def forward(self, x):
        y = self.inner(x)
        return y + torch.cat((torch.zeros_like(x[:1]), x[:-1])) if self.looks_back else y + 0.5 * x


def mixed(looks_back):
    def program(model):
        layer = model.decoder.layers["0"]
        layer.mlp = Mixed(layer.mlp, looks_back)
        train(model)

    return weights(program)


class WithAuxiliaryLoss(nn.Module):
    """Leaves a loss on itself, and counts its forwards, as routers do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        y = self.inner(x)
        self.auxiliary = y.square().mean()
        with torch.no_grad():
            self.forwards += 1
        return y


def auxiliary(model):
    """The loss that a module leaves on itself has its gradient, in the first step too."""
    layer = model.decoder.layers["0"]
    layer.mlp = WithAuxiliaryLoss(layer.mlp)
    # of the rows of a rank the mean is a part: its gradient alone is looked at, on one sum of all ranks' rows
    loss_of(model)
    assert layer.mlp.auxiliary.requires_grad and layer.mlp.forwards == 1
    layer.mlp = layer.mlp.inner
    train(model)


CASES = [
    Case("a module of one's own that leaves a loss and a count on itself, in a layer", weights(auxiliary)),
    Case(
        "a module of one's own that looks at the token before, in a layer",
        mixed(looks_back=True),
        remedy="`gather_from_sequence_region` before it",
        elsewhere={SEQUENCE: ("told", "looks along the sequence")},
    ),
    Case("a module of one's own that works by token, in a layer", mixed(looks_back=False)),
    told("`model.output_layer(h)` by hand", gradients(loss_of_hidden_states), "`gather_logits`", "gather_logits"),
    told(
        "`nn.init.normal_` of some weights before the first forward (nanoGPT's)",
        initialized(lambda p: nn.init.normal_(p, std=0.02 / math.sqrt(4))),
        "a generator of its own per rank",
        "generator",
    ),
    told(
        "`nn.init.xavier_uniform_` of some weights before the first forward",
        initialized(nn.init.xavier_uniform_),
        "a generator of its own per rank",
        "generator",
    ),
    Case("`nn.init.zeros_` of some weights before the first forward", initialized(nn.init.zeros_)),
    told("a trust ratio in step six only", steps_of(trust_ratio_in_step_six)),
    told("a rate by `p.shape` (muP)", weights(scaled_by_width), "`layout_of(p).shape`", "layout_of"),
    told("a decay by `p.numel()`", weights(decayed_by_size), "`layout_of(p).shape`", "layout_of"),
    told("noise of `torch.randn(p.shape)`", weights(noise_of_shape), "`layout_of(p).shape`", "layout_of"),
    told("norms of what `torch.autograd.grad` gives", weights(clipped_gradients), NORM, "get_grad_norm"),
    Case("SGD by hand of what `torch.autograd.grad` gives", weights(plain_gradients)),
    told("norms of momenta made by `zeros_like(p)`", momentum(normalized=True)),
    Case("momenta made by `zeros_like(p)`", momentum(normalized=False)),
]
