"""Buffers that a forward writes (running statistics, codebooks) are the first data rank's, as under DDP."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state.collectives import all_gather_objects, broadcast
from core.parallel_state.state import ParallelState

Key = tuple[int, str]  # number of the stage, name in it


class BufferCopies:
    """Sends the first rank's buffers after each step, and before each further forward of one (accumulation).

    Which buffers a model writes is seen in its first forward in training, and agreed by all ranks; others, such as
    rotary tables, are never sent. A write that comes later is told.
    stages: their modules. One broadcast per dtype over the data group, of written buffers only.
    """

    def __init__(self, stages: Sequence[nn.Module], ps: ParallelState) -> None:
        self._group, self._stages = ps.group("dp-cp"), stages
        held = {id(t) for stage in stages for t in stage.buffers() if t.numel() and t.layout is torch.strided}
        self._places = [
            ((i, f"{path}.{name}" if path else name), module, name)
            for i, stage in enumerate(stages)
            for path, module in stage.named_modules()
            for name, tensor in module._buffers.items()
            if id(tensor) in held
        ]
        self.enabled = self._group is not None and bool(self._places)
        self._written: list[Key] | None = None  # None: not known yet
        self._dirty = self._told = False
        self._first: dict[Key, Tensor] = {}
        self._versions: dict[Key, tuple[int, int]] = {}
        self._hooks: list[Any] = []
        if self.enabled:
            # values, not versions: batch norms write without one
            self._first = {key: t.detach().clone() for key, t in self._tensors().items()}
            self._hooks = [stage.register_forward_pre_hook(self._before_forward) for stage in stages]

    def _tensors(self) -> dict[Key, Tensor]:
        return {key: t for key, module, name in self._places if (t := module._buffers[name]) is not None}

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not module.training or module not in self._stages or torch._C._current_graph_task_id() != -1:
            return
        if self._dirty and torch.is_grad_enabled():
            self.send()
        self._dirty = True

    @torch.no_grad()
    def send(self) -> None:
        """What forwards in training have written since the last time. Collective over the data group."""
        if not (self.enabled and self._dirty):
            return
        self._dirty = False
        found = self._tensors()
        if self._written is None:
            mine = [key for key, tensor in found.items() if not _same(self._first.get(key), tensor)]
            self._first = {}
            told = all_gather_objects(mine, self._group)
            self._written = sorted({key for theirs in told for key in theirs})
            self._versions = {key: (id(t), t._version) for key, t in found.items() if key not in self._written}
        elif not self._told:
            self._tell(found)
        if not self._written:
            return
        assert self._group is not None
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for key in self._written:
            by_dtype.setdefault(found[key].dtype, []).append(found[key])
        for tensors in by_dtype.values():
            flat = torch.cat([t.contiguous().view(-1) for t in tensors])
            broadcast(flat.view(torch.uint8), self._group)
            if self._group.rank:
                for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _tell(self, found: dict[Key, Tensor]) -> None:
        for key, seen in self._versions.items():
            tensor = found.get(key)
            if tensor is None or seen != (id(tensor), tensor._version):
                self._told = True
                warnings.warn(
                    f"DataParallel: buffer {key[1]} was written for the first time after the first step, so every "
                    "rank keeps its own; write it in the first forward in training too",
                    stacklevel=4,
                )
                return

    def remove(self) -> None:
        """No hooks any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.enabled = [], False


def _same(before: Tensor | None, tensor: Tensor) -> bool:
    return before is not None and before.shape == tensor.shape and torch.equal(before, tensor)
