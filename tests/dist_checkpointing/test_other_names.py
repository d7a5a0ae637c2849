"""A checkpoint opens with and without the wrappers of torch.compile and checkpoint_wrapper, and old ones do."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from core.data_parallel import DataParallel
from core.dist_checkpointing import (
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)
from core.dist_checkpointing.state.other_names import OtherNames, as_saved_here
from core.optimizer import OptimizerConfig, ShardedAdamW, sharded_state_dict
from core.parallel_state.modules import named_parameters, named_stacks
from tests.dist_checkpointing import small
from tests.states import state as parallel

# of torch's own, while it compiles
pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mean = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return x + torch.tanh(self.up(self.mean(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped(model, how):
    if how == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    if how == "compiled":
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, torch.compile(layer, backend="eager"))
    return model


class Run:
    def __init__(self, ps, zero, how, when="after"):
        torch.manual_seed(1)
        self.model = Model().double()
        if when == "before":
            wrapped(self.model, how)
        self.shard = DataParallel(self.model, ps, zero_stage=zero)
        self.optimizer = ShardedAdamW(self.shard, OptimizerConfig(lr=0.02, weight_decay=0.1))
        if when == "after":
            wrapped(self.model, how)

    def state(self):
        return {"model": sharded_state_dict(self.shard), "optimizer": self.optimizer}

    def train(self, steps):
        losses = []
        for step in steps:
            losses.append(self.model(small.whole("x", (6, 4), step).double()).square().mean())
            losses[-1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [loss.item() for loss in losses]


def goes_on(how, when, zero, root):
    """max |difference| of losses after a checkpoint that a wrapped model wrote, opened plain, wrapped, and again."""
    ps = parallel()
    run = Run(ps, zero, how, when)
    run.train(range(3))
    save(run.state(), root, ps=ps)
    plain = Run(ps, 0, None)
    # at stage 3 a rank names what it holds a part of
    assert sharded_state_dict(run.shard).keys() <= sharded_state_dict(plain.shard).keys()
    assert not any("wrapped" in key or "_orig_mod" in key for key in load_tensors_metadata(root))
    load(plain.state(), root, ps=ps)
    again = Run(ps, zero, how, when)
    load(again.state(), root, ps=ps)
    true = run.train(range(3, 6))
    found = plain.train(range(3, 6)), again.train(range(3, 6))
    return max(abs(a - b) for losses in found for a, b in zip(losses, true, strict=True))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
def test_wrapped_layers_are_saved_under_their_own_names(ranks, tmp_path, how, when, zero):
    assert max(ranks(goes_on, how, when, zero, str(tmp_path / "x"), world=2)) < 1e-13


def test_checkpoints_that_have_the_wrappers_in_their_names(tmp_path, single):
    """As they were written before: model, main weights, moments, and torch's optimizers with their options."""
    run = Run(single, 1, None)
    run.train(range(3))
    save(run.state(), tmp_path / "plain", ps=single)
    old = {
        key.replace("layers.0.", "layers.0._orig_mod.").replace(
            "layers.1.", "layers.1._checkpoint_wrapped_module."
        ): v
        for key, v in {**load_plain_tensors(tmp_path / "plain"), **load_common_state_dict(tmp_path / "plain")}.items()
    }
    assert any(key.startswith("optimizer/exp_avg/layers.0._orig_mod.") for key in old)
    save(old, tmp_path / "old", ps=single)
    true = run.train(range(3, 6))
    for how in (None, "compiled", "checkpointed"):
        again = Run(single, 3, how)
        _, report = load(again.state(), tmp_path / "old", ps=single, strict="report")
        assert not report, str(report)
        assert again.train(range(3, 6)) == pytest.approx(true, abs=1e-13)


def test_torchs_optimizer_finds_the_states_of_a_compiled_model(tmp_path, single):
    models = [Model(), torch.compile(Model(), backend="eager")]
    for model, other in (models, models[::-1]):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "x", ps=single)
        new = torch.optim.AdamW(other.parameters(), lr=0.5)
        load({"model": other.state_dict(), "optimizer": new}, tmp_path / "x", ps=single)
        assert new.param_groups[0]["lr"] == 0.1
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(optimizer.state[ours]["exp_avg"], new.state[theirs]["exp_avg"])


def test_names_that_would_meet_stay():
    """A module of one's own with that name; and stacks of wrapped stages."""
    odd = nn.Module()
    odd.weight, odd._orig_mod = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    assert [name for name, _ in named_parameters(odd)] == ["weight", "_orig_mod.weight", "bias"]
    stage = Model()
    stage.stacks = {"layers": 2}
    assert set(named_stacks({0: torch.compile(stage)})) == {"layers"}


def test_which_key_is_found():
    names = OtherNames(["model/a.w", "model/_orig_mod.b.w", "x/_orig_mod.c", "x/_checkpoint_wrapped_module.c", "n"])
    assert names.find("model/_orig_mod.a.w") == "model/a.w" and names.find("model/b.w") == "model/_orig_mod.b.w"
    assert names.find("optimizer/main/b.w") == "optimizer/main/_orig_mod.b.w"
    # two have it as their other name: neither
    assert names.find("x/c") == "x/c" and names.find("n") == "n" and names.find("none") == "none"
    assert as_saved_here("optimizer/state/a.w/exp_avg") == "optimizer/exp_avg/a.w"
    assert as_saved_here("optimizer/state.a.w.exp_avg_sq") == "optimizer/exp_avg_sq/a.w"
    assert as_saved_here("model/estate/a/step") == "model/estate/a/step"


def test_what_lies_there_instead_of_a_checkpoint(tmp_path, single):
    state = {"w": torch.ones(2)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    torch.save(state, tmp_path / "w.pt")
    save(state, tmp_path / "steps" / "x", ps=single)
    for name, told in (
        (
            "dcp",
            r"torch\.distributed\.checkpoint wrote it; python -m core\.dist_checkpointing import \S+/dcp NEW_DIR",
        ),
        (
            "w.pt",
            r"w\.pt is a file, and checkpoints are directories; what torch's own save wrote its own load reads",
        ),
        ("none", r"none does not exist; give a step's own directory"),
        ("steps", r"steps/ is no checkpoint: it has no manifest\.json; give a step's own directory"),
    ):
        with pytest.raises(FileNotFoundError, match=told):
            load({"w": torch.zeros(2)}, tmp_path / name, ps=single)
