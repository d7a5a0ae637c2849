"""A model that a program made deeper (SOLAR, G_stack) or shorter (ShortGPT) is saved as the model that it is now."""

import copy

import pytest
import torch
from torch import nn

from core import dist_checkpointing
from core.parallel_state import ParallelState
from core.parallel_state.modules import named_stacks
from tests.models.gpt import batch, gpt
from tests.states import state


def put_behind(layers):
    for number in range(2):
        layers[str(2 + number)] = copy.deepcopy(layers[number])


def twice(layers):
    return nn.ModuleList([copy.deepcopy(layer) for layer in [*layers.values()] * 2])


def without_the_second(layers):
    return nn.ModuleList([layer for number, layer in layers.items() if number != "1"])


# layers before, how they change, layers after
CHANGES = {
    "put behind": (2, put_behind, 4),
    "a list, twice": (2, twice, 4),
    "one left out": (3, without_the_second, 2),
}


def changed(change, ps):
    before, function, after = CHANGES[change]
    model = gpt(facts={"num_layers": before}, parallel=ps)
    layers = function(model.decoder.layers)
    if layers is not None:
        model.decoder.layers = layers
    assert list(model.decoder.layers.keys()) == [str(number) for number in range(after)]
    return model


def save(change, directory):
    ps = state(tp=2)
    model = changed(change, ps)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, directory, ps=ps)


@pytest.mark.parametrize("change", CHANGES)
def test_it_opens_in_a_model_of_that_depth(ranks, single, tmp_path, change):
    ranks(save, change, str(tmp_path / "saved"))
    tokens, labels = batch()
    want = changed(change, single)(tokens, labels=labels)
    model = gpt(facts={"num_layers": CHANGES[change][2]}, parallel=single, seed=5)
    dist_checkpointing.load({"model": model.sharded_state_dict()}, str(tmp_path / "saved"), ps=single)
    torch.testing.assert_close(model(tokens, labels=labels), want, rtol=0, atol=0)


def test_layers_with_a_gap_are_refused(single):
    model = gpt(facts={"num_layers": 3}, parallel=single)
    del model.decoder.layers["1"]
    with pytest.raises(ValueError, match=r"layers 0, 2, and the model was built with 3.*ModuleList"):
        model.sharded_state_dict()


def add_to_a_stage():
    model = gpt(facts={"num_layers": 4}, parallel=state(pp=2))
    layers = model.decoder.layers
    layers["4"] = copy.deepcopy(next(iter(layers.values())))
    with pytest.raises(ValueError, match=r"built with 4.*all on one stage"):
        named_stacks(model)


def test_layers_that_one_stage_adds_are_refused(ranks):
    ranks(add_to_a_stage)


def test_stages_are_as_deep_as_their_model():
    for layers in (range(2), range(2, 4)):
        half = gpt(facts={"num_layers": 4}, parallel=ParallelState.single("cpu"), layers=layers)
        assert named_stacks(half)["decoder.layers"].layers == 4
