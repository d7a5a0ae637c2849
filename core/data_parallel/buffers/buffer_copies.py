"""Buffers that a forward writes (running statistics, codebooks) are the first data rank's, as under DDP."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd.recomputation.notes import which_run
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_gather_objects, broadcast
from core.parallel_state.state import ParallelState

Key = tuple[int, str]  # number of the stage, name in it


class BufferCopies:
    """Sends the first rank's buffers before each forward in training, as DDP does, and after each step.

    Buffers in a module's `equal_buffers` are left alone: the module computes the same on all ranks.
    Which buffers are written is seen before and after the first forward in training, and agreed by all ranks; others,
    such as rotary tables, are never sent. A write that comes later is a warning.
    stages: their modules. One broadcast per dtype over the data group, of written buffers only.
    """

    def __init__(self, stages: Sequence[nn.Module], ps: ParallelState) -> None:
        self._group = ps.group("dp-cp")
        self._stages = stages
        # (key, module, name) of every dense buffer
        self._watched: list[tuple[Key, nn.Module, str]] = []
        for number, stage in enumerate(stages):
            # sparse ones have no flat view to send; empty ones may be resized in the first forward
            dense_ids = {id(b) for b in stage.buffers() if b.layout is torch.strided}
            for path, module in stage.named_modules():
                own = getattr(module, "equal_buffers", ())
                for name, buffer in module._buffers.items():
                    if id(buffer) in dense_ids and name not in own:
                        full_name = f"{path}.{name}" if path else name
                        self._watched.append(((number, full_name), module, name))
        # of batch norms, which save them for a backward in training without need
        self._is_statistic = {
            key: isinstance(module, nn.modules.batchnorm._NormBase)
            for key, module, _ in self._watched
        }
        self.enabled = self._group is not None and bool(self._watched)
        self._written: list[Key] = []
        # the program may write before the first forward, the model in it: two agreements
        self._agreements = 0
        self._dirty = self._warned = False
        self._initial_values: dict[Key, Tensor] = {}
        self._versions: dict[Key, tuple[int, int]] = {}
        self._hooks: list[Any] = []
        if self.enabled:
            # compare values, not versions: batch norm kernels write without changing a version
            self._initial_values = {
                key: buffer.detach().clone() for key, buffer in self._tensors().items()
            }
            self._hooks = [
                stage.register_forward_pre_hook(self._before_forward) for stage in stages
            ]

    def _tensors(self) -> dict[Key, Tensor]:
        return {
            key: buffer
            for key, module, name in self._watched
            if (buffer := module._buffers[name]) is not None
        }

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if (
            not module.training
            or module not in self._stages
            or torch._C._current_graph_task_id() != -1
        ):
            return
        run = which_run()
        # the second run works on copies of the buffers as the first found them
        if run == 2:
            return
        if torch.is_grad_enabled() or run == 1:
            self._send()
        self._dirty = True

    def send(self) -> None:
        """After a step: send what forwards in training have written. Collective over the data group."""
        if self.enabled and self._dirty:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        self._dirty = False
        tensors = self._tensors()
        if self._agreements < 2:
            self._agree(tensors)
        elif not self._warned:
            self._warn_of_late_write(tensors)
        if not self._written:
            return
        assert self._group is not None
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for key in self._written:
            tensor = tensors[key]
            if self._is_statistic[key]:
                # no backward in training reads it: a forward before this one may still have its own to come
                tensor = tensor.data
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for same_dtype in by_dtype.values():
            # one message per dtype, sent as bytes: not every backend knows every dtype
            flat = torch.cat([buffer.contiguous().view(-1) for buffer in same_dtype])
            if not flat.numel():
                continue
            broadcast(flat.view(torch.uint8), self._group)
            if self._group.rank:
                for tensor, values in zip(
                    same_dtype, flat.split([buffer.numel() for buffer in same_dtype]), strict=True
                ):
                    tensor.copy_(values.view(tensor.shape))

    def _agree(self, tensors: dict[Key, Tensor]) -> None:
        """Every rank may have run other branches: what one wrote, all send."""
        self._agreements += 1
        is_written = {
            key: not _is_unchanged(self._initial_values.get(key), tensor)
            for key, tensor in tensors.items()
        }
        sizes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        of_ranks = all_gather_objects((is_written, sizes), self._group)
        written = {
            key for rank_written, _ in of_ranks for key, is_one in rank_written.items() if is_one
        }
        # what has another size on another rank cannot be sent
        self._written = [
            key
            for key in sorted(written)
            if all(rank_sizes.get(key) == of_ranks[0][1].get(key) for _, rank_sizes in of_ranks)
        ]
        if self._agreements == 2:
            self._initial_values = {}
            for key, tensor in tensors.items():
                if key not in self._written:
                    self._versions[key] = (id(tensor), tensor._version)

    def _warn_of_late_write(self, tensors: dict[Key, Tensor]) -> None:
        for key, seen_version in self._versions.items():
            tensor = tensors.get(key)
            if tensor is None or seen_version != (id(tensor), tensor._version):
                self._warned = True
                warnings.warn(
                    f"DataParallel: buffer {key[1]} was written for the first time after the first step, so every "
                    "rank keeps its own; write it before or in the first forward in training too",
                    stacklevel=program_level(),
                )
                return

    def remove(self) -> None:
        """Take the hooks out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.enabled = False


def _is_unchanged(before: Tensor | None, tensor: Tensor) -> bool:
    return before is not None and before.shape == tensor.shape and torch.equal(before, tensor)
