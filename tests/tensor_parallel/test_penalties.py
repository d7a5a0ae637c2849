"""Penalties on weights that tensor ranks hold whole, under sequence parallelism, which sums their gradients."""

import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state.layout import layout_of
from core.tensor_parallel import full_tensor
from tests.states import state

S, VOCAB, DECAY = 8, 40, 0.3


class Scaled(nn.Module):
    """An adapter of a program's own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((16,), 1.5, dtype=torch.float64))

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) * self.scale


def penalty_of(p, how, ps):
    is_replicated = "tp" not in layout_of(p).split
    if how == "whole":
        return (full_tensor(p, parallel=ps) - 0.1).pow(2).sum()
    if how == "direct":
        return (p - 0.1).pow(2).sum() if is_replicated else 0.0
    # a log: with a gradient that nobody asks for
    p.norm().item()
    return 0.0


def trained(how, owner, tp):
    """Whole weights after two steps, and what was told."""
    ps = state(tp=tp, sp=tp > 1)
    config = llama_config(num_layers=1, hidden_size=16, num_attention_heads=2, params_dtype=torch.float64)
    model = GPTModel(config, llama_spec(), VOCAB, S, parallel=ps, seed=1)
    layer = model.decoder.layers["0"]
    layer.input_layernorm = Scaled(layer.input_layernorm)
    # used in the loss alone
    model.weights = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
    wrapped = DataParallel(model, ps, zero_stage=0) if owner else None
    parameters = [p for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.randint(VOCAB, (2, S + 1), generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
            loss = loss * model.weights[0].exp() + model.weights.sum().square()
            for p in parameters:
                loss = loss + DECAY * penalty_of(p, how, ps)
            loss.backward()
            if wrapped is not None:
                wrapped.finish()
            with torch.no_grad():
                for p in parameters:
                    gradient = p.main_grad if wrapped is not None else p.grad
                    p -= 0.1 * gradient
                    gradient.zero_()
    whole = {name: full_tensor(p, parallel=ps).detach().clone() for name, p in zip(names, parameters, strict=True)}
    return whole, [str(w.message) for w in caught if "penalt" in str(w.message)]


@pytest.mark.parametrize("owner", [False, True])
@pytest.mark.parametrize("how", ["whole", "direct", "logged"])
def test_a_penalty_counts_once(ranks, how, owner):
    expected, _ = trained(how, owner, 1)
    (found, told), (_, told_there) = ranks(trained, how, owner, 2, world=2)
    if how == "direct":
        assert len(told) == len(told_there) == 1 and "full_tensor" in told[0], told
        return
    assert not told
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: {m}")


def second_gradient():
    config = llama_config(num_layers=1, hidden_size=16, num_attention_heads=2, params_dtype=torch.float64)
    model = GPTModel(config, llama_spec(), VOCAB, S, parallel=state(tp=2), seed=1)
    tokens = torch.arange(S)[None]
    loss = model(tokens, labels=tokens).mean()
    parameters = list(model.parameters())
    torch.autograd.grad(loss, parameters)
    try:
        torch.autograd.grad(loss, parameters)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_torchs_is_torchs(ranks):
    assert all(seen.startswith("RuntimeError: ") for seen in ranks(second_gradient, world=2))
