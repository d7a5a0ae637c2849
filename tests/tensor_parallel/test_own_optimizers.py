"""Optimizers of one's own on split and fused matrices: told by what they compute, elementwise ones hear nothing."""

import warnings

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from core.models.gpt import GPTModel, llama_spec
from core.transformer import TransformerConfig
from tests.pipeline.test_own_optimizers import Adafactor, Compiled, Lars, Own
from tests.pool import RankError
from tests.states import state

SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "add_bias_linear": False}
NEVER = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


class Adan(Own):
    """Elementwise, with buffers of the parameters' shapes, and a count."""

    def update(self, params, lr):
        for p in params:
            one = self.state[p]
            if not one:
                one.update(step=0, before=torch.zeros(p.shape, dtype=p.dtype), mean=torch.zeros_like(p))
            one["step"] += 1
            difference = p.grad - one["before"]
            one["mean"].lerp_(p.grad + 0.9 * difference, 0.1)
            one["before"].copy_(p.grad)
            p.mul_(1 - lr).sub_(lr * one["mean"].sign() / one["step"])


class Signs(Own):
    def update(self, params, lr):
        torch._foreach_add_(params, torch._foreach_sign([p.grad for p in params]), alpha=-lr)


def momentum_update(p, gradient, momentum, lr):
    momentum.mul_(0.9).add_(gradient)
    p.sub_(lr * momentum.sign())


class CompiledMomentum(Compiled):
    update_one = staticmethod(momentum_update)


class Orthogonal(Own):
    """A step of Newton and Schulz."""

    def update(self, params, lr):
        for p in params:
            update = p.grad
            if p.dim() == 2:
                update = 1.5 * update - 0.5 * update @ update.T @ update
            p.sub_(lr * update)


class TrustRatio(Own):
    """Norms of one parameter after the other, by a name that says nothing."""

    def update(self, params, lr):
        for p, of_p, of_gradient in zip(
            params, torch._foreach_norm(params), torch._foreach_norm([p.grad for p in params]), strict=True
        ):
            p.sub_(lr * p.grad * of_p / of_gradient)


class RowScaled(Own):
    """One rate for each row of what it takes for a matrix."""

    def update(self, params, lr):
        for p in params:
            scale = p.grad.square().mean(dim=-1, keepdim=True) if p.dim() > 1 else 1.0
            p.sub_(lr * p.grad / (scale + 1e-6))


def said_of(make):
    """What is told in three steps."""
    ps = state(tp=state().size("dp-cp"))
    config = TransformerConfig(**SHAPE, **NEVER, num_query_groups=2, gated_linear_unit=True, activation_func="silu")
    torch.manual_seed(0)
    model = GPTModel(config, llama_spec(), 32, 8, parallel=ps)
    optimizer = make(model.parameters())
    tokens, labels = torch.arange(16).view(2, 8), torch.arange(1, 17).view(2, 8)

    def closure():
        loss = model(tokens, labels=labels).mean()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True, action="always") as caught:
        if make is torch.optim.LBFGS:
            optimizer.step(closure)
        for _ in range(0 if make is torch.optim.LBFGS else 3):
            model(tokens, labels=labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert classes_inside(model, tokens) == {torch.nn.Parameter}
    return [str(w.message) for w in caught]


def classes_inside(model, tokens):
    """Of the parameters of a model's modules while it runs: nobody listens there."""
    found = set()

    def look(module, args):
        if module is not model:  # who listens stops at the beginning of its forward
            found.update(map(type, module.parameters()))

    with register_module_forward_pre_hook(look), torch.no_grad():
        model(tokens)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("make", [Adan, Signs, CompiledMomentum])
def test_elementwise_ones_hear_nothing(ranks, make, world):
    assert not any(ranks(said_of, make, world=world))


@pytest.mark.parametrize(
    "make, name", [(TrustRatio, "foreach_norm"), (Orthogonal, "matmul"), (RowScaled, "mean"), (Compiled, "")]
)
def test_what_takes_norms_or_products_of_a_part_is_told_once(ranks, make, name):
    for told in ranks(said_of, make, world=2):
        assert len(told) == 1, told
        assert all("a matrix as a whole" in message and name in message for message in told)


@pytest.mark.parametrize("make, is_told", [(Lars, True), (Adafactor, True), (RowScaled, True), (Orthogonal, False)])
def test_fused_matrices_of_one_process(ranks, make, is_told):
    (told,) = ranks(said_of, make, world=1)
    assert len(told) == is_told and all("[groups, heads, d, h]" in message for message in told), told


def test_lbfgs_is_refused_by_its_name(ranks):
    with pytest.raises(RankError, match="LBFGS takes products over all parameters, of which tensor ranks hold parts"):
        ranks(said_of, torch.optim.LBFGS, world=2)
    # it makes one vector of all parameters, whatever their dims
    assert ranks(said_of, torch.optim.LBFGS, world=1) == [[]]
    assert ranks(said_of, torch.optim.Adam, world=2) == [[], []]
