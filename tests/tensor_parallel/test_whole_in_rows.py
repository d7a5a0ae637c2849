"""A part of a layer that gathers all rows under sequence parallelism, and scatters them again."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt2_spec
from core.parallel_state.layout import Layout, layout_of, set_layout
from core.tensor_parallel import gather_from_sequence_region, scatter_to_sequence_region
from core.transformer import TransformerConfig
from tests.parity.whole import assert_same, whole
from tests.states import state

H, V, S, D = 16, 64, 8, torch.float64


class Rolled(nn.Module):
    """Mixes neighbours: it needs all rows."""

    def __init__(self, group, says_whole, to_tensor_region):
        super().__init__()
        self.group, self.to_tensor_region = group, to_tensor_region
        torch.manual_seed(2)
        self.up, self.down = nn.Linear(H, 8, dtype=D), nn.Linear(8, H, dtype=D)
        for p in self.parameters() if says_whole else ():
            set_layout(p, Layout(tuple(p.shape)))

    def forward(self, x):
        x = gather_from_sequence_region(x, self.group, to_tensor_region=self.to_tensor_region)
        y = self.down(torch.tanh(self.up(x + 0.5 * x.roll(1, 0))))
        return scatter_to_sequence_region(y, self.group)


class OfRows(nn.Linear):
    """As anybody's: what it does to a rank's rows needs no word."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(H, H, dtype=D)


def three_steps(model, ps, wraps, lr):
    """What was said of gradients that are too large, and the last step's."""
    if wraps:
        DataParallel(model, ps)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            tokens = torch.randint(V, (2, S + 1), generator=generator)
            model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous()).mean().backward()
            gradients = {n: whole(n, p.grad, layout_of(p), ps) for n, p in model.named_parameters()}
            optimizer.step()
    messages = [str(w.message) for w in found]
    return [text for text in messages if "added up" in text or "adds it up" in text], gradients


def trained(tp, wraps, *how):
    ps = state(tp=tp, sp=tp > 1)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype=D, **dropout)
    group = ps.group("tp")
    if group is not None:
        group.compared_copies = 0  # other tests compare in these ranks, too

    def mlp(build):
        return Rolled(group, *how) if how else OfRows()

    spec = dataclasses.replace(gpt2_spec(), mlp=mlp)
    model = GPTModel(config, spec, V, S, parallel=ps, seed=1)
    return three_steps(model, ps, wraps, 0.0)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("how", [(), (True, False), (False, False), (True, True)])
def test_whole_gradients_are_not_summed_or_told(ranks, how, wraps):
    """A sum that an owner of gradients makes, once per step, is told; where each backward asks, it is right."""
    ((_, want),) = ranks(trained, 1, False, *how, world=1)
    for told, gradients in ranks(trained, 2, wraps, *how, world=2):
        if not how or how == (True, False) or (how == (False, False) and not wraps):
            assert told == []
            assert_same(gradients, want)
        elif how == (False, False):
            assert len(told) == 1
            assert "mlp.up.weight and 3 more: its gradient is the same on all of tensor ranks [0, 1]" in told[0]
            assert "is added up, 2 times too large" in told[0] and "set_layout(parameter" in told[0]
        else:
            assert "gather_from_sequence_region(to_tensor_region=True) got one gradient on all" in told[0]


class WithValues(GPTModel):
    """A head of a subclass, made after GPTModel's own parts: on a rank's rows, or on all."""

    def __init__(self, *args, gathers, **how):
        super().__init__(*args, **how)
        torch.manual_seed(9)
        self.value, self.gathers = nn.Linear(H, 1, dtype=D), gathers

    def forward(self, tokens, labels):
        hidden = []
        hook = self.decoder.register_forward_hook(lambda module, given, output: hidden.append(output))
        losses = super().forward(tokens, labels=labels)
        hook.remove()
        x, group = hidden[0], self.place.group
        if self.gathers:
            x = gather_from_sequence_region(x, group, to_tensor_region=False)
        values = self.value(x)
        if not self.gathers:
            values = gather_from_sequence_region(values, group, to_tensor_region=False)
        return losses + 0.1 * (values[..., 0].T - labels.to(D) / V) ** 2


def trained_values(tp, wraps, gathers):
    ps = state(tp=tp, sp=tp > 1)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, params_dtype=D, **dropout)
    model = WithValues(config, gpt2_spec(), V, S, parallel=ps, seed=1, gathers=gathers)
    return three_steps(model, ps, wraps, 0.1)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_a_head_of_a_subclass_is_one_processs(ranks, gathers, wraps):
    ((_, want),) = ranks(trained_values, 1, False, gathers, world=1)
    for told, gradients in ranks(trained_values, 2, wraps, gathers, world=2):
        assert told == []
        assert_same(gradients, want)
