"""Document boundaries inside rows, against Megatron's own loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.context_parallel import visible_mask
from core.datasets.packing import IGNORED_LABEL, Packing

END = 7


def megatron(tokens):
    """What `_get_ltor_masks_and_position_ids` of Megatron's GPTDataset does with all three options, row by row."""
    s = len(tokens)
    allowed = torch.tril(torch.ones(s, s))
    loss_mask = torch.ones(s)
    loss_mask[tokens == END] = 0
    position_ids = torch.arange(s)
    previous = 0
    for i in torch.arange(s)[tokens == END].tolist():
        allowed[i + 1 :, : i + 1] = 0
        position_ids[i + 1 :] -= i + 1 - previous
        previous = i + 1
    return allowed < 0.5, loss_mask, position_ids


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 3), s=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_everything_is_megatrons(rows, s, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, END + 1, (rows, s), generator=generator)
    tokens[torch.rand(rows, s, generator=generator) < 0.2] = END
    labels = torch.randint(0, END + 1, (rows, s), generator=generator)
    packing = Packing(end_of_text=END, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    batch = packing.batch(tokens, labels.clone())
    hidden = visible_mask(batch["document_begin"])
    assert hidden.shape == (rows, 1, s, s)
    assert batch["position_ids"].dtype == torch.int64
    for row in range(rows):
        mask, loss_mask, position_ids = megatron(tokens[row])
        assert torch.equal(hidden[row, 0], mask)
        assert torch.equal(batch["position_ids"][row], position_ids)
        assert torch.equal(batch["labels"][row], torch.where(loss_mask > 0, labels[row], IGNORED_LABEL))


@pytest.mark.parametrize(
    ("option", "keys"),
    [
        ({}, set()),
        ({"reset_position_ids": True}, {"position_ids"}),
        ({"reset_attention_mask": True}, {"document_begin"}),
        ({"eod_mask_loss": True}, set()),
    ],
)
def test_only_what_is_asked_for(option, keys):
    tokens = torch.tensor([[1, END, 2]])
    batch = Packing(end_of_text=END, **option).batch(tokens, torch.tensor([[END, 2, 3]]))
    assert batch.keys() == {"tokens", "labels"} | keys
    ignored = -100 if "eod_mask_loss" in option else 2
    assert batch["labels"].tolist() == [[END, ignored, 3]]


def test_no_row_is_masked_out_altogether():
    packing = Packing(end_of_text=0, reset_attention_mask=True)
    batch = packing.batch(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64))
    mask = visible_mask(batch["document_begin"])
    assert torch.equal(mask[0, 0], ~torch.eye(5, dtype=torch.bool)), "padding that is the end of text sees itself"


def test_options_without_an_end_of_text_are_refused():
    with pytest.raises(ValueError, match="reset_position_ids, eod_mask_loss need end_of_text, got None"):
        Packing(reset_position_ids=True, eod_mask_loss=True)
