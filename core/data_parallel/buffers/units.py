"""ZeRO-3's weights just in time: gathered before a module runs, forward or backward, and freed after it.

A unit is a layer, or what is left of its pipeline stage (the root). In forward module hooks gather; in backward hooks
on the outputs, which run before the backward of the unit itself. The next unit is prefetched: its all-gather runs
while this one computes. That works for any module, with any activation checkpointing: a region that runs again calls
no module hooks of its own, and its unit was gathered when its backward began.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.refusals import RootHook
from core.data_parallel.weights.table import Members


class Unit:
    """A module and the buckets that it needs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.buffers: list[Buffer] = []
        self.parameters: list[Parameter] = []
        # parameters that this backward has not reached
        self.missing_gradients = 0
        # number of the last backward that came here
        self.last_backward = -1

    def add_buffer(self, buffer: Buffer) -> None:
        """Add a bucket, whose parameters belong to this unit."""
        self.buffers.append(buffer)
        self.parameters += buffer.parameters

    def prefetch(self) -> None:
        """Start to gather the parameters."""
        for buffer in self.buffers:
            buffer.start_gather()

    def gather(self) -> None:
        """Wait until the parameters are there."""
        for buffer in self.buffers:
            buffer.gather()

    def free(self, *, keep: bool = True) -> None:
        """Free the memory of full parameters; keep: what was written into them counts."""
        for buffer in self.buffers:
            buffer.free(keep=keep)


def _backward_now() -> int:
    """The number of the backward that runs, never the same twice; -1 outside."""
    return torch._C._current_graph_task_id()


class StageUnits:
    """The units of one stage, and the hooks that call them.

    layers: in the order of execution; the next one is prefetched. frees: parameters are freed after use
    (ZeRO-3); else the hooks only wait for what the last step sent. divided: gradients are summed in every backward
    (ZeRO-2, 3); backward_begins is called when one reaches the stage.
    """

    def __init__(
        self, root: Unit, layers: list[Unit], *, frees: bool, divided: bool, backward_begins: Any
    ) -> None:
        self.root = root
        self.layers = layers
        self.split = self.unsharded = False
        self._frees = frees
        self._divided = divided
        self._backward_begins = backward_begins
        # units whose backward has begun and that are not freed yet
        self._in_backward: list[Unit] = []
        # number of the last backward that came to the root
        self._last_backward = -1
        # between the hooks of the root
        self._in_root_forward = False
        self._hooks: list[Any] = []
        self._hook(root, None)
        for position, unit in enumerate(layers):
            self._hook(unit, position)

    def _hook(self, unit: Unit, position: int | None) -> None:
        @torch.compiler.disable
        def before(module: nn.Module, args: Any) -> None:
            # a deep copy has the hooks too
            if module is unit.module:
                self._before_forward(unit, position)

        @torch.compiler.disable
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is unit.module:
                self._after_forward(unit, position, output)

        # our hook runs first before forward and last after it, so that users' hooks see full parameters
        self._hooks.append(unit.module.register_forward_pre_hook(before, prepend=True))
        # a whole module that is pickled says so by the first hook that is met, the root's
        last = RootHook(after) if position is None else after
        self._hooks.append(unit.module.register_forward_hook(last))
        if position is None:

            @torch.compiler.disable
            def leave(module: nn.Module, args: Any, output: Any) -> None:
                if module is unit.module:
                    self._in_root_forward = False

            # also called where the forward raised
            self._hooks.append(unit.module.register_forward_hook(leave, always_call=True))

    def _before_forward(self, unit: Unit, position: int | None) -> None:
        if position is None:
            self._in_root_forward = True
        unit.gather()
        next_position = 0 if position is None else position + 1
        if self._frees and next_position < len(self.layers):
            self.layers[next_position].prefetch()

    def _after_forward(self, unit: Unit, position: int | None, output: Any) -> None:
        # by a method of the program's, which calls layers but not the root: no hook of the root sees its backward
        without_root = not self._in_root_forward and _backward_now() == -1
        # backwards inside of a transform of torch.func reach no parameter: its gradients are its results
        with_graph = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
        if with_graph and (self._frees or (self._divided and position is None)):
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(
                        lambda gradient: self._before_backward(unit, position, without_root)
                    )
        # backward follows at once and begins with the last layer and the root: gathering them again would be waste
        backward_is_next = (
            with_graph and not self.split and (position is None or position == len(self.layers) - 1)
        )
        # a recomputed forward runs inside of its own backward, which still needs the weights
        is_recomputed = unit in self._in_backward and _backward_now() == unit.last_backward
        if self._frees and not (self.unsharded or backward_is_next or is_recomputed):
            unit.free()

    def _before_backward(self, unit: Unit, position: int | None, without_root: bool) -> None:
        current = _backward_now()
        # once per backward: other outputs have the hook, too
        if (position is None or without_root) and current != self._last_backward:
            self._last_backward = current
            # leftovers of a backward that failed, or did not reach every parameter
            self._in_backward.clear()
            is_plain_loop = self._backward_begins()
            self.begin_backward()
            # create_graph=True: a graph of this backward needs the weights afterwards
            if is_plain_loop and not torch.is_grad_enabled():
                torch.autograd.Variable._execution_engine.queue_callback(self.free)
        if position is None:
            return
        # nothing was freed; or this is another output of the layer, which was gathered for the first
        if not self._frees or (unit in self._in_backward and unit.last_backward == current):
            return
        # Units behind this one are finished when every parameter has its gradient.
        finished = [
            other
            for other in self._in_backward
            if not other.missing_gradients and not self.unsharded
        ]
        for other in finished:
            self._in_backward.remove(other)
            other.free()
        unit.gather()
        unit.missing_gradients = len(unit.parameters)
        unit.last_backward = current
        if unit not in self._in_backward:
            self._in_backward.append(unit)
        if position:
            self.layers[position - 1].prefetch()

    def gather(self) -> None:
        """Wait until the parameters of all units are there."""
        for unit in (self.root, *self.layers):
            unit.gather()

    def begin_backward(self) -> None:
        """Before anything of a backward: gather what only the root holds, and prefetch the last layer."""
        if self._frees:
            self.root.gather()
            if self.layers:
                self.layers[-1].prefetch()

    def free(self, *, keep: bool = True) -> None:
        """After a backward, or when parameters have changed (then not keep: what was gathered before is outdated)."""
        self._in_backward.clear()
        if self._frees and not self.unsharded:
            for unit in (self.root, *self.layers):
                unit.free(keep=keep)

    def set_unsharded(self, unsharded: bool) -> None:
        """True: free nothing from now on. False: adopt what was written meanwhile, and free all, what is lent too."""
        self.unsharded = unsharded
        if not unsharded:
            self.free()
        for unit in (self.root, *self.layers):
            for buffer in unit.buffers:
                buffer.unsharded = unsharded
                if not unsharded:
                    buffer.end_loan()

    @property
    def may_wait_at_use(self) -> bool:
        """Whether gathers that are under way may stay so until the weights are used."""
        return any(
            _runs_beside_us(buffer) for unit in (self.root, *self.layers) for buffer in unit.buffers
        )

    def remove(self) -> None:
        """Take the hooks out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _runs_beside_us(buffer: Buffer) -> bool:
    """Whether collectives of this bucket need no CPU cores of ours."""
    return buffer.ranks is not None and buffer.ps.device.type not in buffer.ranks.gloo


def needs_units(buffers: Sequence[Buffer], zero_stage: int, overlap: bool) -> bool:
    """Whether weights or gradients come and go, or gathered weights are waited for where they are used."""
    if all(buffer.ranks is None for buffer in buffers):
        return False
    waits_at_use = overlap and zero_stage >= 1 and any(map(_runs_beside_us, buffers))
    return waits_at_use or zero_stage >= 2


def make_units(
    stage: Members, buffers: Sequence[Buffer], zero_stage: int, backward_begins: Callable[[], bool]
) -> StageUnits:
    """The layers of a pipeline stage with their buckets; what is in no layer belongs to the root."""
    layers = {name: Unit(module) for name, module in stage.units.items()}
    root = Unit(stage.module)
    for buffer in buffers:
        in_one_unit = all(parameter in stage.names for parameter in buffer.parameters)
        if in_one_unit and buffer.bucket.unit:
            unit = layers[buffer.bucket.unit]
        else:
            unit = root
        unit.add_buffer(buffer)
    return StageUnits(
        root,
        list(layers.values()),
        frees=zero_stage == 3,
        divided=zero_stage >= 2,
        backward_begins=backward_begins,
    )
