"""A run that goes on draws the masks of its next steps, where the step's number was handed on; else it is told."""

import copy
import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.training import next_token_loss
from tests.pipeline import tiny
from tests.states import state

ALONE = ParallelState.single("cpu")
TOLD = r"AdamW had made 2 updates when this executor began at step 0.*= 2 if each step was one update"


def loss(y, part):
    return y.square().sum() / y.numel() / 2, 0.5  # the mean over 2 microbatches


class Functional(nn.Module):
    """Draws, and has no module that says so."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x):
        return F.dropout(torch.tanh(self.linear(x)), 0.3, self.training)


class Run:
    """A loop of one's own: weights, optimizer and executor on this rank."""

    def __init__(self, executor, optimizer_of, sync):
        torch.manual_seed(3)
        ps = state(pp=2) if executor == "pipeline" else ALONE if executor == "alone" else state()
        self.model = Functional()
        shard = DataParallel([self.model], ps, zero_stage=1) if sync else None
        self.optimizer = optimizer_of(self.model, shard)
        how = {"ps": ps, "num_microbatches": 2, "grad_sync": shard}
        if executor == "pipeline":
            self.executor = Pipeline([self.model], recompute="stage", **how)
        else:
            self.executor = SingleStage(self.model, **how)

    def go(self, begin, end):
        for number in range(begin, end):
            self.optimizer.zero_grad()
            self.executor.step(tiny.rows(8, seed=number), loss)
            self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]

    def saved(self):
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step_index": self.executor.step_index,
            "random": torch.get_rng_state(),
        }
        return copy.deepcopy(parts)

    def load(self, parts, *, hands_on):
        parts = copy.deepcopy(parts)  # torch takes its counts as they are
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        torch.set_rng_state(parts["random"])
        if hands_on:
            self.executor.step_index = parts["step_index"]


def torchs(model, shard):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def ours(model, shard):
    return ShardedAdamW(shard, OptimizerConfig(lr=0.01))


def resumed(executor, optimizer_of, sync):
    whole = Run(executor, optimizer_of, sync)
    whole.go(0, 2)
    parts = whole.saved()
    unbroken = whole.go(2, 4)
    assert parts["step_index"] == 2 and whole.executor.step_index == 4

    same = Run(executor, optimizer_of, sync)
    same.load(parts, hands_on=True)
    assert all(map(torch.equal, same.go(2, 4), unbroken))  # warnings are errors

    forgotten = Run(executor, optimizer_of, sync)
    forgotten.load(parts, hands_on=False)
    with warnings.catch_warnings(record=True, action="always") as caught:
        other = forgotten.go(2, 6)
        other = forgotten.go(2, 4)
    assert not any(map(torch.equal, other, unbroken))
    return [(str(w.message), w.filename) for w in caught]


@pytest.mark.parametrize("optimizer_of, sync", [(torchs, False), (torchs, True), (ours, True)])
@pytest.mark.parametrize("executor, world", [("alone", 1), ("pipeline", 2)])
def test_a_run_that_goes_on_is_the_unbroken_one_or_told(ranks, executor, world, optimizer_of, sync):
    for told in ranks(resumed, executor, optimizer_of, sync, world=world):
        assert len(told) == 1, told
        assert "had made 2 updates when this executor began at step 0" in told[0][0]
        assert told[0][1] == __file__


def test_our_own_dropout_is_noticed():
    """Its seeds are put in and taken out around each mask: torch's generator shows nothing."""
    ps = ALONE

    def made(dropout):
        torch.manual_seed(0)
        config = llama_config(
            num_layers=1, hidden_size=16, num_attention_heads=2, hidden_dropout=dropout, attention_dropout=0.0
        )
        model = GPTModel(config, llama_spec(), 11, 8, parallel=ps)
        shard = DataParallel(model, ps)
        return SingleStage(model, ps=ps, grad_sync=shard), ShardedAdamW(shard, OptimizerConfig(lr=0.01))

    tokens = torch.arange(16).view(2, 8) % 11
    batch = {"tokens": tokens, "labels": (tokens + 1) % 11, "position_ids": torch.arange(8).expand(2, 8)}

    def go(executor, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            optimizer.step(executor.step(batch, next_token_loss).num_tokens)

    for dropout in (0.0, 0.1):
        executor, optimizer = made(dropout)
        go(executor, optimizer, 2)
        saved = optimizer.state_dict()
        executor, optimizer = made(dropout)
        optimizer.load_state_dict(saved)
        if dropout:
            with pytest.warns(UserWarning, match=TOLD):
                go(executor, optimizer, 1)
        go(executor, optimizer, 2)


def saved_adamw(model):
    """The state of an optimizer of two updates, through a file."""
    optimizer = torchs(model, None)
    for _ in range(2):
        model(tiny.rows(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def going_on(model, optimizer=None):
    optimizer = optimizer or torchs(model, None)
    optimizer.load_state_dict(saved_adamw(model))
    return optimizer, SingleStage(model, ps=ALONE, num_microbatches=2)


def update(executor, optimizer, seed=0):
    optimizer.zero_grad()
    executor.step(tiny.rows(8, seed=seed), loss)
    optimizer.step()


def test_without_random_numbers_nothing_is_said():
    for model in (tiny.part(0), nn.Sequential(tiny.part(0), nn.Dropout(0.0)), Functional().eval()):
        optimizer, executor = going_on(model)
        for seed in range(3):
            update(executor, optimizer, seed)


def test_an_optimizer_without_a_count_of_updates_hears_nothing():
    model = Functional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        model(tiny.rows(4)).sum().backward()
        optimizer.step()
    update(SingleStage(model, ps=ALONE, num_microbatches=2), optimizer)


class CountsElsewhere(torch.optim.SGD):
    """Its counts lie where they cannot be read (as fused and capturable optimizers' on an accelerator)."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.ones((), device="meta")


def test_a_count_on_a_device_is_not_waited_for():
    model = Functional()
    optimizer = CountsElsewhere(model.parameters(), lr=0.01)
    for _ in range(2):
        model(tiny.rows(4)).sum().backward()
        optimizer.step()
    update(SingleStage(model, ps=ALONE, num_microbatches=2), optimizer)


def test_executors_and_plain_loops_that_share_an_optimizer_hear_nothing():
    """Updates that were made since an executor exists are no earlier run's."""
    model = Functional()
    optimizer = torchs(model, None)
    executors = [SingleStage(model, ps=ALONE, num_microbatches=2, seed=seed) for seed in range(2)]
    for _ in range(3):
        model(tiny.rows(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for number in range(6):
        update(executors[number % 3 % 2], optimizer, number)


def test_an_optimizer_of_other_parameters_hears_nothing():
    model, other = Functional(), Functional()
    optimizer = torchs(other, None)
    optimizer.load_state_dict(saved_adamw(other))
    executor = SingleStage(model, ps=ALONE, num_microbatches=2)
    executor.step(tiny.rows(8), loss)
    other(tiny.rows(4)).sum().backward()
    optimizer.step()


def test_a_new_executor_in_the_middle_of_a_run_is_told():
    """It draws the numbers of the first one's steps 0 and 1 again."""
    model = Functional()
    optimizer = torchs(model, None)
    first = SingleStage(model, ps=ALONE, num_microbatches=2)
    update(first, optimizer)
    update(first, optimizer)
    second = SingleStage(model, ps=ALONE, num_microbatches=2)
    with pytest.warns(UserWarning, match=TOLD):
        update(second, optimizer)


@pytest.mark.parametrize("number", [0, 7, np.int64(3)])
def test_any_number_that_is_set_is_what_is_meant(number):
    optimizer, executor = going_on(Functional())
    executor.step_index = number
    update(executor, optimizer)
    assert executor.step_index == number + 1 and type(executor.step_index) is int


@pytest.mark.parametrize("number", [-1, 2.0, "3", None])
def test_what_is_no_number_of_steps_is_refused(number):
    executor = SingleStage(Functional(), ps=ALONE)
    with pytest.raises(ValueError, match=r"step_index=.* must be an integer of at least 0"):
        executor.step_index = number
    assert executor.step_index == 0
