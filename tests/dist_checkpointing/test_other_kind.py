"""A checkpoint of torch's AdamW goes on with ShardedAdamW, and back: next steps are those of the one that saved."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)

from core.data_parallel import DataParallel
from core.dist_checkpointing import ShardedObject, Source, load, load_common_state_dict, save
from core.dist_checkpointing.__main__ import main
from core.optimizer import OptimizerConfig, ShardedAdamW, sharded_state_dict
from tests.dist_checkpointing import small
from tests.states import state as parallel

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)}
CONFIG = OptimizerConfig(lr=0.02, weight_decay=0.1, adam_beta2=0.95, weight_decay_of="all", clip_grad=0.0)


class Run:
    """A model with one of both optimizers and a scheduler of torch's."""

    def __init__(self, kind, ps, zero, *, late=False):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.late = late
        self.shard = DataParallel(self.model, ps, zero_stage=zero)
        if kind == "torch":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)
        else:
            self.optimizer = ShardedAdamW(self.shard, CONFIG)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def state(self):
        return {"model": sharded_state_dict(self.shard), "optimizer": self.optimizer}

    def train(self, steps):
        for step in steps:
            x = small.whole("x", (6, 4), step).double()
            # the first layer trains from the third step on: its counts are behind
            self.model[0].requires_grad_(not self.late or step > 1)
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def goes_on(kind, other, zero, root):
    """max |difference| after 3 + 3 steps to the run that went on with the optimizer that saved."""
    ps = parallel()
    run = Run(kind, ps, zero).train(range(3))
    save(run.state(), root, ps=ps)
    again = Run(other, ps, zero)
    _, report = load(again.state(), root, ps=ps, strict="report")
    assert not report, str(report)
    load(again.state(), root, ps=ps)
    again.scheduler.load_state_dict(run.scheduler.state_dict())
    return float((again.train(range(3, 6)).weights() - run.train(range(3, 6)).weights()).abs().max())


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("kind, other", [("torch", "ours"), ("ours", "torch")])
def test_the_next_steps_are_those_of_the_one_that_saved(ranks, tmp_path, kind, other, zero):
    assert max(ranks(goes_on, kind, other, zero, str(tmp_path / "x"), world=2)) < 1e-14


@pytest.mark.parametrize("kind, other", [("torch", "ours"), ("ours", "torch")])
def test_counts_of_a_parameter_that_came_late(tmp_path, single, kind, other):
    run = Run(kind, single, 0, late=True).train(range(4))
    save(run.state(), tmp_path / "x", ps=single)
    again = Run(other, single, 0, late=True)
    load(again.state(), tmp_path / "x", ps=single)
    again.scheduler.load_state_dict(run.scheduler.state_dict())
    torch.testing.assert_close(
        again.train(range(4, 6)).weights(), run.train(range(4, 6)).weights(), rtol=0, atol=1e-14
    )


def test_states_of_the_dict_form_too(tmp_path, single):
    run = Run("torch", single, 1).train(range(3))
    save(run.state(), tmp_path / "x", ps=single)
    assert not any(key.endswith("step_count") for key in load_common_state_dict(tmp_path / "x"))
    again = Run("ours", single, 1)
    state = {"model": sharded_state_dict(again.shard), "optimizer": again.optimizer.sharded_state_dict()}
    again.optimizer.load_state_dict(load(state, tmp_path / "x", ps=single)["optimizer"])
    assert again.optimizer.step_count == 3
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"] == 0.005


def named_apart(key):
    """Of a key of the whole model here: what it is there, flat."""
    return Source(key, shape=(8, 4)) if key.endswith("/0.weight") else key


def moves_under_a_mapping(zero, root):
    """max |difference| to torch's AdamW, whose moments and counts a mapping brings, one of them in another shape."""
    ps = parallel()
    run = Run("torch", ps, 0).train(range(3))
    state = {**run.model.state_dict(), "0.weight": run.model[0].weight.detach().view(-1)}
    moments = {
        kind: {name: run.optimizer.state[p][kind] for name, p in run.model.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq", "step")
    }
    for kind in ("exp_avg", "exp_avg_sq"):
        moments[kind]["0.weight"] = moments[kind]["0.weight"].view(-1)
    options = {key: value for key, value in run.optimizer.param_groups[0].items() if key != "params"}
    # values of their own, as torch's optimizers are saved
    flat = {f"optimizer/param_groups/{name}": options for name in state}
    save({"model": state, "optimizer": moments} | as_values(flat), root, ps=ps)
    again = Run("ours", ps, zero)
    load(again.state(), root, ps=ps, mapping=named_apart)
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    again.scheduler.load_state_dict(run.scheduler.state_dict())
    return float((again.train(range(3, 6)).weights() - run.train(range(3, 6)).weights()).abs().max())


def as_values(options):
    return {key: ShardedObject(key, value) for key, value in options.items()}


@pytest.mark.parametrize("zero", [1, 3])
def test_moments_and_counts_come_with_a_mapping(ranks, tmp_path, zero):
    assert max(ranks(moves_under_a_mapping, zero, str(tmp_path / "x"), world=2)) < 1e-14


def test_a_mapping_of_the_group(tmp_path, single):
    run = Run("torch", single, 0).train(range(3))
    save({"model": run.model.state_dict(), "adam": run.optimizer}, tmp_path / "x", ps=single)
    again = Run("ours", single, 1)
    load(again.state(), tmp_path / "x", ps=single, mapping=lambda key: key.replace("optimizer/", "adam/"))
    again.scheduler.load_state_dict(run.scheduler.state_dict())
    torch.testing.assert_close(
        again.train(range(3, 6)).weights(), run.train(range(3, 6)).weights(), rtol=0, atol=1e-14
    )


def test_counts_that_differ_do_not_come_with_a_mapping(tmp_path, single):
    run = Run("torch", single, 0, late=True).train(range(4))
    save(run.state(), tmp_path / "x", ps=single)
    told = r"have different counts of updates, and a mapping says .* Load without one, .*; then load with the mapping"
    with pytest.raises(ValueError, match=told):
        load(Run("ours", single, 0).state(), tmp_path / "x", ps=single, mapping=lambda key: key)


def from_dcp(flat, mapping, zero, root):
    """max |difference| to the run of torch's AdamW whose state torch.distributed.checkpoint wrote."""
    ps = parallel()
    run = Run("torch", ps, 0).train(range(3))
    if ps.rank == 0:
        model, optimizer = get_state_dict(run.model, run.optimizer)
        if flat:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            optimizer = get_optimizer_state_dict(run.model, run.optimizer, options=options)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{root}/dcp", no_dist=True)
        assert main(["import", f"{root}/dcp", f"{root}/ours"]) == 0
    if ps.world is not None:
        torch.distributed.barrier()
    again = Run("ours", ps, zero)
    _, report = load(again.state(), f"{root}/ours", ps=ps, strict="report", mapping=mapping)
    assert not report, str(report)
    assert again.optimizer.step_count == 3
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    again.scheduler.load_state_dict(run.scheduler.state_dict())
    return float((again.train(range(3, 6)).weights() - run.train(range(3, 6)).weights()).abs().max())


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("flat, mapping", [(False, None), (True, None), (False, {"model/0.bias": "model/0.bias"})])
def test_an_import_of_dcp_goes_on_with_ours(ranks, tmp_path, flat, mapping, zero):
    assert max(ranks(from_dcp, flat, mapping, zero, str(tmp_path), world=2)) < 1e-14


def test_other_kinds_are_told(tmp_path, single):
    run = Run("torch", single, 0)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
    run.train(range(2))
    save(run.state(), tmp_path / "sgd", ps=single)
    told = r"'optimizer' has the states of another kind of optimizer: one of torch\.optim was saved, one of "
    with pytest.raises(ValueError, match=rf"{told}core\.optimizer is here.*or leave 'optimizer' out of the state"):
        load(Run("ours", single, 0).state(), tmp_path / "sgd", ps=single)
    ours = Run("ours", single, 0).train(range(2))
    save(ours.state(), tmp_path / "ours", ps=single)
    with pytest.raises(ValueError, match=r"one of core\.optimizer was saved, one of torch\.optim is here"):
        load(run.state(), tmp_path / "ours", ps=single)


def test_different_rates_in_one_group_are_told(tmp_path, single):
    run = Run("torch", single, 0)
    first, second = run.model[0].parameters(), run.model[2].parameters()
    run.optimizer = torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.5}], **OPTIONS)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
    save(run.train(range(2)).state(), tmp_path / "x", ps=single)
    with pytest.raises(ValueError, match=r"param_groups\[0\], such as 0\.weight, were saved with different rates"):
        load(Run("ours", single, 0).state(), tmp_path / "x", ps=single)
