"""Who is called around optimizers' steps comes and goes with its object, while torch walks through its hooks, too."""

import gc

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from core.parallel_state.optimizer_steps import after_optimizer_steps, before_optimizer_steps


class Listener:
    def __init__(self, heard):
        self.heard = heard
        self.listeners = [before_optimizer_steps(self.before), after_optimizer_steps(self.after)]

    def before(self, optimizer, args, kwargs):
        self.heard.append("before")

    def after(self, optimizer, args, kwargs):
        self.heard.append("after")


def stepped():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_a_listener_is_called_until_it_is_gone():
    heard = []
    listener = Listener(heard)
    stepped()
    assert heard == ["before", "after"]
    del listener
    gc.collect()
    stepped()
    assert len(heard) == 2


def test_a_listener_is_called_until_it_is_removed():
    heard = []
    listener = Listener(heard)
    for one in listener.listeners:
        one.remove()
        one.remove()
    stepped()
    assert not heard


def test_one_that_python_collects_inside_of_a_step_ends_no_step():
    """In a cycle: it goes when the collector comes, here between torch's hooks."""
    heard = []
    cyclic = Listener(heard)
    cyclic.itself = cyclic

    def collect(optimizer, args, kwargs):
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    try:
        del cyclic
        stepped()
        stepped()
    finally:
        handle.remove()


def test_one_that_comes_inside_of_a_step_is_called_from_the_next_one_on():
    heard = []

    class Adds:
        def before(self, optimizer, args, kwargs):
            self.new = Listener(heard)

    adds = Adds()
    listener = before_optimizer_steps(adds.before)
    stepped()
    listener.remove()
    assert heard == ["after"]
    stepped()
    assert heard == ["after", "before", "after"]
