"""Hooks that are given a context rank's rows without gradients: on one rank alone, and where nothing comes of it."""

import warnings

import torch

from core.data_parallel import DataParallel
from tests.models.gpt import gpt
from tests.states import state
from tests.zoo.context_losses import Program


def looked_on(on_all):
    """What is told where hooks only look: DataParallel asks all ranks, whoever had hooks."""
    ps = state(cp=2)
    model, seen = gpt("llama", parallel=ps), []
    if on_all or ps.rank == 0:
        layer = model.decoder.layers[0]
        handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output.square().mean()))
    with torch.no_grad():
        Program(model, ps, 0).losses()
    if seen:
        handle.remove()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        DataParallel(model, ps, zero_stage=1).remove()
    return [str(one.message) for one in told]


def test_hooks_that_look_are_no_calibration(ranks):
    assert ranks(looked_on, True, world=2) == ranks(looked_on, False, world=2) == [[], []]
