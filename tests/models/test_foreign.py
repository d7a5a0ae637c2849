"""What users do to a model from outside: parts with parameters of their own, copies, values out of range."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn

from core.models.gpt import gpt2_spec
from core.parallel_state import layout_of
from core.transformer.attention.self_attention import CoreAttention
from tests.models.gpt import VOCAB, batch, gpt
from tests.parity.whole import assert_same, whole_gradients
from tests.states import state


class Scaled(CoreAttention):
    """Attention whose values are scaled by a parameter that nobody gave a layout."""

    def __init__(self, build):
        super().__init__(build)
        self.scale = nn.Parameter(torch.full((build.config.head_size,), 1.5, dtype=torch.float64))

    def forward(self, q, k, v, attention_mask=None):
        return super().forward(q, k, v * self.scale, attention_mask)


def gradients_of_a_part_over_heads(tp, sp):
    ps, (tokens, labels) = state(tp=tp, sp=sp), batch()
    model = gpt(parallel=ps, spec=dataclasses.replace(gpt2_spec(), core_attention=Scaled))
    model(tokens, labels=labels).sum().backward()
    return whole_gradients(model, ps)  # which asserts that replicas agree


@pytest.mark.parametrize("sp", [False, True])
def test_a_part_over_heads_has_its_whole_gradient(ranks, sp):
    want = ranks(gradients_of_a_part_over_heads, 1, False, world=1)[0]
    assert any(name.endswith("core_attention.scale") for name in want)
    for found in ranks(gradients_of_a_part_over_heads, 2, sp):
        assert_same(found, want)


def copied(tp):
    ps, (tokens, labels) = state(tp=tp, sp=True), batch()
    model = gpt(parallel=ps)
    other = copy.deepcopy(model)
    for module in (model, other):
        module(tokens, labels=labels).sum().backward()
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert p is not q and layout_of(p) == layout_of(q), name
    assert_same(whole_gradients(other, ps), whole_gradients(model, ps), 0.0)
    assert other.stage is not model.stage and other.decoder.layers["0"].mlp.linear_fc1.stage is other.stage


@pytest.mark.parametrize("tp", [1, 2])
def test_a_copied_model_is_the_same_model(ranks, tp):
    ranks(copied, tp, world=tp)


def test_the_loss_can_be_viewed(single):
    tokens, labels = batch()
    assert gpt(parallel=single)(tokens, labels=labels).view(-1).shape == (tokens.numel(),)


@pytest.mark.parametrize(
    "where, value, message",
    [
        ("tokens", VOCAB, f"tokens holds {VOCAB}, valid are 0 to {VOCAB - 1}"),
        ("tokens", -1, "tokens holds -1, valid are 0 to"),
        ("labels", VOCAB + 4, f"labels holds {VOCAB + 4}, valid are 0 to {VOCAB - 1}, or -100 to leave a token out"),
        ("labels", -1, "labels holds -1"),
        ("position_ids", -1, "position_ids holds -1, valid are 0 to"),
        ("position_ids", 10_000, "position_ids holds 10000"),
    ],
)
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_values_out_of_range_are_refused(single, style, where, value, message):
    """Padded rows, a clamped lookup or a loss of no label would take some of these without a word."""
    model, (tokens, labels) = gpt(style, parallel=single), batch()
    given = {
        "tokens": tokens,
        "labels": labels,
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens).clone(),
    }
    assert model(**given).isfinite().all()
    given[where][0, 1] = value
    with pytest.raises(ValueError, match=message):
        model(**given)


def test_a_mask_of_hugging_faces_is_answered(single):
    """Of padding on the right none is needed; on the left what is told gives the numbers of the rows alone."""
    model, (tokens, labels) = gpt("llama", parallel=single).eval(), batch()
    s = tokens.shape[1]
    attention_mask = torch.ones_like(tokens)
    attention_mask[0, -3:] = 0
    with pytest.raises(ValueError, match="Padding on the right needs none: leave attention_mask out, and have -100"):
        model(tokens, attention_mask=attention_mask)
    attention_mask = attention_mask.flip(1)
    with pytest.raises(ValueError, match=r"on the left give ~attention_mask\.bool\(\)\[:, None, None, :\]"):
        model(tokens, attention_mask=attention_mask)
    mask = ~attention_mask.bool()[:, None, None, :] | torch.ones(s, s, dtype=torch.bool).triu(1)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    found = model(tokens, positions, mask, labels)
    assert (found[0, 3:] - model(tokens[:1, 3:], labels=labels[:1, 3:])).abs().max() < 1e-6
    assert (found[1] - model(tokens, labels=labels)[1]).abs().max() < 1e-6 and found.isfinite().all()


def told_of_labels(model, tokens, labels):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(tokens, labels=labels).sum()
    return [str(one.message) for one in told if "labels equal tokens" in str(one.message)]


@pytest.mark.parametrize("ignored", ["nothing", "prompt", "padding", "a row's tail", "a row"])
def test_labels_that_are_not_shifted_are_told_whatever_is_left_out(single, ignored):
    tokens = batch()[0]
    labels = tokens.clone()
    places = {"prompt": (slice(None), slice(3)), "padding": (slice(None), slice(-3, None)), "a row": (0,)}
    places["a row's tail"] = (0, slice(-3, None))
    if ignored in places:
        labels[places[ignored]] = -100
    assert len(told_of_labels(gpt(parallel=single), tokens, labels)) == 1


def test_labels_that_may_be_shifted_are_not_told(single):
    tokens, labels = batch()
    assert not told_of_labels(gpt(parallel=single), tokens, labels.index_fill(1, torch.arange(3), -100))
    # a text that repeats one token, where both are the same
    assert not told_of_labels(gpt(parallel=single), torch.full_like(tokens, 3), torch.full_like(tokens, 3))
    # nothing counts, or too little to say anything
    few = torch.full_like(tokens, -100)
    assert not told_of_labels(gpt(parallel=single), tokens, few.clone())
    few[0, 1] = tokens[0, 1]
    assert not told_of_labels(gpt(parallel=single), tokens, few)
