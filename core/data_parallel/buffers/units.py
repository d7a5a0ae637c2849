"""Whole parameters just in time: gathered before a module runs, forward or backward, and freed after it (ZeRO-3).

A unit is a layer, or what is left of its stage (the root). Forward asks by module hooks; backward by hooks on the
outputs, which run before anything behind them does. Works for any module, with any recomputation: a region that runs
again calls no module hooks of its own, and its unit has been gathered when its backward began.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.data_parallel.buffers.buffers import Buffer


class Unit:
    """A module and the buckets that it needs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers: list[Buffer] = []
        self.parameters: list[Parameter] = []
        self.to_come = 0  # parameters that this backward has not reached
        self.backward = -1  # number of the last backward that came here

    def take_in(self, buffer: Buffer) -> None:
        """Add a bucket, whose parameters belong to this unit."""
        self.buffers.append(buffer)
        self.parameters += buffer.parameters

    def start(self) -> None:
        """Ask for the parameters."""
        for buffer in self.buffers:
            buffer.start_gather()

    def need(self) -> None:
        """Until they are there."""
        for buffer in self.buffers:
            buffer.gather()

    def free(self, *, keep: bool = True) -> None:
        """Give their memory back; keep: what was written into them counts."""
        for buffer in self.buffers:
            buffer.free(keep=keep)


def _backward_now() -> int:
    """The number of the backward that runs, never the same twice; -1 outside."""
    return torch._C._current_graph_task_id()


class StageUnits:
    """The units of one stage, and the hooks that call them.

    layers: in the order of execution; the one after next is asked for ahead. frees: parameters go after use
    (ZeRO-3); else the hooks only wait for what the last step sent. divided: gradients are summed in every backward
    (ZeRO-2, 3); backward_begins is called when one reaches the stage.
    """

    def __init__(self, root: Unit, layers: list[Unit], *, frees: bool, divided: bool, backward_begins: Any) -> None:
        self.root, self.layers = root, layers
        self.split = self.held = False
        self._frees, self._divided, self._backward_begins = frees, divided, backward_begins
        self._behind: list[Unit] = []  # whose backward has begun
        self._backward = -1  # number of the last backward that came to the root
        self._hooks: list[Any] = []
        self._hook(root, None)
        for place, unit in enumerate(layers):
            self._hook(unit, place)

    def _hook(self, unit: Unit, place: int | None) -> None:
        @torch.compiler.disable
        def before(module: nn.Module, args: Any) -> None:
            if module is unit.module:  # a deep copy has the hooks too
                self._before_forward(unit, place)

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is unit.module:
                self._after_forward(unit, place, output)

        # first of all before, last of all after: the user's hooks see whole parameters
        self._hooks.append(unit.module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(unit.module.register_forward_hook(after))

    def _before_forward(self, unit: Unit, place: int | None) -> None:
        unit.need()
        following = 0 if place is None else place + 1
        if self._frees and following < len(self.layers):
            self.layers[following].start()

    def _after_forward(self, unit: Unit, place: int | None, output: Any) -> None:
        differentiated = torch.is_grad_enabled()
        if differentiated and (self._frees or (self._divided and place is None)):
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(lambda gradient: self._before_backward(unit, place))
        # backward follows at once, and begins with these two
        soon = differentiated and not self.split and (place is None or place == len(self.layers) - 1)
        again = unit in self._behind and _backward_now() == unit.backward  # recomputed in its own backward
        if self._frees and not (self.held or soon or again):
            unit.free()

    def _before_backward(self, unit: Unit, place: int | None) -> None:
        now = _backward_now()
        if place is None:
            if now != self._backward:  # else one more output
                self._backward = now
                self._behind.clear()  # of a backward that failed, or did not reach every parameter
                plain = self._backward_begins()
                self.begin_backward()
                if plain and not torch.is_grad_enabled():  # of a graph of this backward weights are still needed
                    torch.autograd.Variable._execution_engine.queue_callback(self.free)
            return
        if not self._frees or (unit in self._behind and unit.backward == now):  # one more output
            return
        for other in [u for u in self._behind if not u.to_come and not self.held]:
            self._behind.remove(other)  # every parameter has its gradient, and now those before it run
            other.free()
        unit.need()
        unit.to_come, unit.backward = len(unit.parameters), now
        if unit not in self._behind:
            self._behind.append(unit)
        if place:
            self.layers[place - 1].start()

    def need(self) -> None:
        """All of them, until they are there."""
        for unit in (self.root, *self.layers):
            unit.need()

    def begin_backward(self) -> None:
        """Before anything of a backward: what only the root knows, and the last layer."""
        if self._frees:
            self.root.need()
            if self.layers:
                self.layers[-1].start()

    def free(self, *, keep: bool = True) -> None:
        """After a backward, or when parameters have changed (then not keep: what was gathered before is old)."""
        self._behind.clear()
        if self._frees and not self.held:
            for unit in (self.root, *self.layers):
                unit.free(keep=keep)

    def keep(self, held: bool) -> None:
        """Free nothing from now on; or free all, what is lent too, with what was written meanwhile."""
        self.held = held
        if not held:
            self.free()
        for unit in (self.root, *self.layers):
            for buffer in unit.buffers:
                buffer.kept = held
                if not held:
                    buffer.end_loan()

    @property
    def waits(self) -> bool:
        """Whether gathers that are under way may stay so until the weights are used."""
        groups = [b.ranks for unit in (self.root, *self.layers) for b in unit.buffers]
        return any(group is not None and not group.composed for group in groups)

    def remove(self) -> None:
        """No hooks any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
