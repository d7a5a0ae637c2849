"""Stages of one's own in a checkpoint: equal names on two pipeline ranks are told apart, or refused."""

import pytest
import torch
from torch import nn

from core.data_parallel import DataParallel
from core.dist_checkpointing import load, save
from core.dist_checkpointing.state.mapping import sharded_state_dict as of_modules
from core.optimizer import sharded_state_dict
from tests.states import state


def stage(ps, value):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value + ps.index("pp"))
    return model


def state_of(model, ps, form, zero_stage):
    modules = {"alone": model, "list": [model], "mapping": {ps.index("pp"): model}}[form]
    if zero_stage is None:
        return of_modules(modules, ps)
    return sharded_state_dict(DataParallel(modules, ps, zero_stage=zero_stage))


def saved(directory, form, zero_stage):
    ps = state(pp=2)
    try:
        save({"model": state_of(stage(ps, 1.0), ps, form, zero_stage)}, directory, ps=ps)
    except ValueError as told:
        return str(told)
    loaded = stage(ps, 7.0)
    load({"model": state_of(loaded, ps, form, None)}, directory, ps=ps)
    return [float(p.mean()) for p in loaded.parameters()] == [1.0 + ps.index("pp")] * 4


@pytest.mark.parametrize("zero_stage, world", [(None, 2), (0, 2), (1, 4), (3, 4)])
@pytest.mark.parametrize("form", ["alone", "list"])
def test_other_values_of_one_name_are_refused(ranks, tmp_path, form, zero_stage, world):
    for told in ranks(saved, tmp_path / "checkpoint", form, zero_stage, world=world):
        assert isinstance(told, str) and "differs between rank 0 and rank" in told, told
        assert "give a mapping {stage number: module}" in told
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("zero_stage, world", [(None, 2), (0, 2), (1, 4), (3, 4)])
def test_numbered_stages_come_back(ranks, tmp_path, zero_stage, world):
    assert ranks(saved, tmp_path / "checkpoint", "mapping", zero_stage, world=world) == [True] * world


def the_same_module(directory):
    """A teacher, say, which every pipeline rank holds in full."""
    ps = state(pp=2)
    teacher = nn.Linear(4, 4)
    nn.init.constant_(teacher.weight, 3.0)
    nn.init.constant_(teacher.bias, 3.0)
    save({"teacher": of_modules(teacher, ps)}, directory, ps=ps)
    nn.init.constant_(teacher.weight, 0.0)
    load({"teacher": of_modules(teacher, ps)}, directory, ps=ps)
    return float(teacher.weight.mean())


def test_a_module_that_is_the_same_on_all_pipeline_ranks_is_saved(ranks, tmp_path):
    assert ranks(the_same_module, tmp_path / "checkpoint", world=2) == [3.0, 3.0]
