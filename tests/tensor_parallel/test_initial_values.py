"""A program's `model.apply(init)` that knows torch's classes: ours are others, and keep the values that they have."""

import warnings

import pytest
from torch import nn

from core.tensor_parallel import ColumnParallelLinear, Placement, RowParallelLinear, VocabParallelEmbedding


def of_linears(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.006)


def of_embeddings(module):
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.006)


def of_both(module):
    if isinstance(module, (nn.Linear, ColumnParallelLinear, RowParallelLinear)):
        nn.init.normal_(module.weight, std=0.006)


def of_all(module):
    if getattr(module, "weight", None) is not None:
        nn.init.normal_(module.weight, std=0.006)


class Model(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.table = VocabParallelEmbedding(16, 8, place=place)
        self.up, self.down = ColumnParallelLinear(8, 16, place=place), RowParallelLinear(16, 8, place=place)
        self.head = nn.Linear(8, 16)

    def by_method(self, module):
        of_linears(module) if isinstance(module, nn.Linear) else None


@pytest.mark.parametrize(
    "function, names",
    [
        (of_linears, {"ColumnParallelLinear", "RowParallelLinear"}),
        (of_embeddings, {"VocabParallelEmbedding"}),
        ("by_method", {"ColumnParallelLinear", "RowParallelLinear"}),
        (of_both, set()),
        (of_all, set()),
        (nn.Module.train, set()),
    ],
)
def test_what_is_chosen_by_torchs_class_is_told(single, function, names):
    model = Model(Placement.of(single))
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert model.apply(getattr(model, function) if isinstance(function, str) else function) is model
    said = [str(w.message) for w in caught]
    assert {text.split("a ")[1].split(" is not")[0] for text in said} == names, said
    assert len(said) == len(names)
