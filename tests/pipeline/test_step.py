"""Cutting batches and calling modules."""

import numpy as np
import pytest
import torch
from torch import nn

from core.pipeline import call_stage, split_microbatches
from core.pipeline.run.arguments import forward_arguments
from core.pipeline.run.step import StepResult, join_outputs, rows_of, stage_seed


class Takes(nn.Module):
    def forward(self, tokens, *, labels=None, **others):
        return tokens, labels, others


class Anything(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_a_mapping_reaches_forward_by_name():
    batch = {"loss_mask": 1, "labels": 2, "tokens": 3}
    assert call_stage(Takes(), batch) == (3, 2, {})
    assert call_stage(Takes(), {"tokens": 3, "loss_mask": 1}) == (3, None, {})
    assert call_stage(Anything(Takes()), batch) == (3, 2, {}), "a wrapper takes what the wrapped one takes"
    assert forward_arguments(Takes()) == ("tokens", "labels")


def test_a_tensor_or_a_tuple_is_passed_by_position():
    x = torch.ones(2)
    assert call_stage(Takes(), x)[0] is x
    assert call_stage(nn.Bilinear(2, 2, 1), (torch.ones(3, 2), torch.ones(3, 2))).shape == (3, 1)


def test_a_mapping_of_which_nothing_fits_is_refused():
    with pytest.raises(
        ValueError, match=r"Takes.forward takes 2 names \(tokens, labels\), none of the batch's 1 \(ids"
    ):
        call_stage(Takes(), {"ids": 1})


def test_microbatches_are_views_that_tile_the_batch():
    batch = {"x": torch.arange(12).view(6, 2), "y": torch.arange(6), "scale": torch.tensor(2.0), "name": "n"}
    parts = split_microbatches(batch, 3)
    assert torch.equal(torch.cat([p["x"] for p in parts]), batch["x"])
    assert torch.equal(torch.cat([p["y"] for p in parts]), batch["y"]) and parts[1]["y"].tolist() == [2, 3]
    assert all(p["scale"] is batch["scale"] and p["name"] == "n" for p in parts)
    assert parts[0]["x"].data_ptr() == batch["x"].data_ptr()
    assert [p.tolist() for p in split_microbatches(torch.arange(4), 2)] == [[0, 1], [2, 3]]
    pairs = split_microbatches((torch.arange(2), torch.arange(2)), 2)
    assert isinstance(pairs[0], tuple) and [t.item() for t in pairs[1]] == [1, 1]


@pytest.mark.parametrize(
    ("batch", "n", "told"),
    [
        (torch.ones(6, 2), 4, r"6 samples does not divide into num_microbatches=4; use one of \[1, 2, 3, 6\]"),
        (torch.ones(2), 0, "num_microbatches=0"),
        ({"x": torch.ones(4), "y": torch.ones(2)}, 2, r"different sizes along dim 0: \{'x': 4, 'y': 2\}"),
        ({"name": "n"}, 1, "a batch of 0 samples"),
    ],
)
def test_batches_that_do_not_divide_are_refused(batch, n, told):
    with pytest.raises(ValueError, match=told):
        split_microbatches(batch, n)


def test_seeds_differ_in_every_part():
    base = (1, 2, 3, 4)
    assert len({stage_seed(*base), *(stage_seed(*(p + (i == j) for j, p in enumerate(base))) for i in range(4))}) == 5


def test_mean_loss():
    assert StepResult(torch.tensor(6.0), torch.tensor(4.0)).loss.item() == 1.5


def test_what_has_a_row_per_sample_is_cut_wherever_it_is():
    x, table = torch.arange(4.0), torch.ones(3, 2)
    batch = {
        "x": x,
        "in": {"y": x + 1, "both": (x + 2, table)},
        "names": list("abcd"),
        "w": np.arange(4),
        "n": [1, 2],
    }
    first, second = split_microbatches(batch, 2)
    assert first["in"]["y"].tolist() == [1, 2] and second["in"]["both"][0].tolist() == [4, 5]
    assert second["names"] == ["c", "d"] and second["w"].tolist() == [2, 3]
    assert first["n"] == [1, 2] and first["in"]["both"][1] is table
    assert rows_of({"in": {"y": x}}) == 4 and len(split_microbatches({"in": {"y": x}}, 4)) == 4


def test_outputs_that_cannot_be_joined_are_refused():
    rows = torch.ones(2, 1)
    assert join_outputs([{"y": rows, "n": 3}, {"y": rows, "n": 3}])["y"].shape == (4, 1)
    for bad, words in (
        ([(rows, 1), (rows, 2)], "returned 1 beside its tensors"),
        ([(rows, [1]), (rows, [1, 2])], "other nestings in 2 microbatches"),
        ([torch.ones(()), torch.ones(())], "a tensor without dims for each of 2"),
    ):
        with pytest.raises(ValueError, match=words):
            join_outputs(bad)
