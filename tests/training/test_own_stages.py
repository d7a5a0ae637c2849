"""Stages of one's own, as the page on configuration shows them, go on under any pipeline; others are told how."""

import re
import sys
from pathlib import Path

import pytest
import torch

from core import dist_checkpointing
from core.training import RunConfig, initialize
from tests.pool import RankError
from tests.training.test_model_facts import fields_of, trained
from tests.training.tiny import prepared

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "configuration.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The directory of the page's module, and of one that says nothing of names."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "self.stacks" in b)
    (tmp_path / "mine.py").write_text(block)
    (tmp_path / "nameless.py").write_text(re.sub(r"\n *self\.stacks = .*", "", block))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)
    sys.modules.pop("nameless", None)


def run_of(made, tmp_path, build, steps, **more):
    kept = {"model__build": build, "model__num_layers": 4, "checkpoint__directory": str(tmp_path / build)}
    return fields_of(made, **kept, **more) | {"training.train_steps": steps, "optimizer.lr_decay_steps": 6}


def test_stages_of_ones_own_go_on_under_another_pipeline(ranks, made, program, tmp_path):
    alone = trained(
        run_of(made, tmp_path, "mine:build", 6) | {"checkpoint.directory": str(tmp_path / "alone")}, program
    )
    found = trained(run_of(made, tmp_path, "mine:build", 2), program)
    for steps, schedule in ((4, "1f1b"), (6, "zb-v")):
        pipeline = {"parallel__pipeline": 2, "pipeline__schedule": schedule}
        losses, *_ = ranks(trained, run_of(made, tmp_path, "mine:build", steps, **pipeline), program, world=2)
        found += losses
    assert found == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize("build", ["nameless:build", "mine:build"])
def test_weights_that_a_program_saved_of_the_module_itself_begin_a_run(made, program, tmp_path, build):
    fields = run_of(made, tmp_path, build, 1) | {"checkpoint.directory": None}
    saved, *_ = initialize(config=RunConfig.from_dict(fields))
    dist_checkpointing.save({"model": saved.module.state_dict()}, tmp_path / "plain")
    weights = {"checkpoint.weights": str(tmp_path / "plain"), "model.seed": 7}
    begun, *_ = initialize(config=RunConfig.from_dict(fields | weights))
    for (name, tensor), want in zip(begun.module.named_parameters(), saved.module.parameters(), strict=True):
        assert torch.equal(tensor, want), name


def test_weights_of_a_module_do_not_begin_a_pipeline(ranks, made, program, tmp_path):
    fields = run_of(made, tmp_path, "nameless:build", 1) | {"checkpoint.directory": None}
    saved, *_ = initialize(config=RunConfig.from_dict(fields))
    dist_checkpointing.save({"model": saved.module.state_dict()}, tmp_path / "plain")
    two = run_of(made, tmp_path, "nameless:build", 1, parallel__pipeline=2)
    two["checkpoint.weights"] = str(tmp_path / "plain")
    with pytest.raises(
        RankError, match=r"the stages of parallel\.pipeline=2 do not have: begin with parallel\.pipeline=1"
    ):
        ranks(trained, two, program, world=2)


def test_names_of_one_pipeline_are_told(ranks, made, program, tmp_path):
    two = run_of(made, tmp_path, "nameless:build", 2, parallel__pipeline=2)
    ranks(trained, two, program, world=2)
    told = (
        r"only there are stages.*Names that begin with stages\. are of one pipeline: .*self\.stacks = \{\"layers\": "
    )
    with pytest.raises(ValueError, match=told):
        trained(run_of(made, tmp_path, "nameless:build", 3), program)


def test_sizes_that_nobody_gave_are_there_in_build(made, program, tmp_path):
    """As --explain shows them; they were None."""
    sizes = ("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.ffn_hidden_size")
    fields = run_of(made, tmp_path, "mine:build", 1) | {"checkpoint.directory": None}
    model, *_ = initialize(config=RunConfig.from_dict({n: v for n, v in fields.items() if n not in sizes}))
    assert len(model.module.layers) == 4 and model.module.layers["0"].up.in_features == 192
