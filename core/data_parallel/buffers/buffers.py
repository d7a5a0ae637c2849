"""The memory of one bucket: weights and gradients as flat storages, parameters and `main_grad` views of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from core.autograd.gradients import owner_changed
from core.data_parallel.weights.weights import Interval, Storage, Weights, nan_placeholder
from core.parallel_state.collectives import (
    Group,
    all_reduce,
    start_gather_parts,
    start_sum_into_own,
)
from core.parallel_state.collectives.ops import PendingCollective
from core.parallel_state.flat import Bucket, flat_intervals
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` parameters are added up: float32 at least."""
    if dtype.itemsize < 4:
        return torch.float32
    return dtype


@dataclass(frozen=True, eq=False)
class Segment:
    """The elements of one parameter that this rank updates.

    interval: elements of the parameter's local flat form. span: where they lie in `Buffer.weights`.
    """

    name: str
    parameter: Parameter
    interval: Interval
    span: Interval


class Buffer(Weights):
    """One bucket on this rank. Written by `DataParallel`, read by optimizers.

    bucket: where each parameter lies. ranks: the group over which it is cut; copies: the group of ranks that hold
    the same shard (HSDP). shard_interval: this rank's equal shard of the bucket; updated_interval: what its optimizer
    updates, the shard, or all at stage 0. weights, gradients: 1-D, live memory of `updated_interval`; gradients are
    complete after `DataParallel.finish`. counted: intervals of it whose gradients this rank counts in the norm:
    every true element on one rank only. number: of the bucket, the same on every rank of the group.
    """

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        parameters: Mapping[str, Parameter],
        ps: ParallelState,
        *,
        zero_stage: int,
        grad_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.number = number
        self.bucket = bucket
        self.ps = ps
        self.parameters = [parameters[slot.name] for slot in bucket.slots]
        is_dense = bucket.group == "dp-cp"
        self.ranks: Group | None = ps.group("shard" if is_dense else bucket.group)
        self.copies: Group | None = ps.group("replicate") if is_dense else None
        # over one rank there is nothing to divide
        if self.ranks is not None:
            self.stage = zero_stage
        else:
            self.stage = min(zero_stage, 1)
        self.shard_interval = (0, bucket.size)
        if self.ranks is not None:
            self.shard_interval = bucket.cut(self.ranks.size, self.ranks.rank)
        if self.stage:
            self.updated_interval = self.shard_interval
        else:
            self.updated_interval = (0, bucket.size)
        self.dtype = self.parameters[0].dtype
        if grad_dtype is not None:
            self.grad_dtype = grad_dtype
        else:
            self.grad_dtype = wide(self.dtype)
        narrower = reduce_dtype is not None and reduce_dtype.itemsize < self.grad_dtype.itemsize
        self._reduce_dtype = reduce_dtype if narrower else None
        self._gathering: PendingCollective | None = None
        self._summing: PendingCollective | None = None
        self._build_weights(ps.device)
        self._build_gradients()

    def _build_gradients(self) -> None:
        size = self.bucket.size
        dtype = self.grad_dtype
        device = self.ps.device
        flat = torch.zeros(size, dtype=dtype, device=device)
        self._full_gradients = self._views(flat)
        self._gradient_placeholders = [nan_placeholder(view) for view in self._full_gradients]
        self._grad_storage = Storage(flat)
        # Gradients that are still empty: the first contribution overwrites them, so no pass writes zeros.
        self._is_empty = [False] * len(self.parameters)
        # since the last zero(), through take() or add()
        self._was_added_to = [False] * len(self.parameters)
        # stages 2, 3: whether no sum of this step has ended yet
        self._first_sum = True
        for parameter, view in zip(self.parameters, self._full_gradients, strict=True):
            parameter.main_grad = view  # type: ignore[attr-defined]
            owner_changed(parameter)
        if self.stage < 2:
            self.gradients = flat[slice(*self.updated_interval)]
        else:
            self.gradients = torch.zeros(
                self.updated_interval[1] - self.updated_interval[0], dtype=dtype, device=device
            )
            self._free_gradients()

    @property
    def memory(self) -> dict[str, list[Tensor]]:
        """ "weights" and "gradients" -> the flat tensors that hold them, also those whose memory comes and goes."""
        return {
            "weights": [self._storage.flat, self.weights],
            "gradients": [self._grad_storage.flat, self.gradients],
        }

    # gradients

    def _free_gradients(self) -> None:
        for index in range(len(self.parameters)):
            self._mark_empty(index)
        self._grad_storage.release()

    def _mark_empty(self, index: int) -> None:
        """The gradient of parameter `index` holds nothing: reading `main_grad` gives NaN."""
        self._is_empty[index] = True
        self.parameters[index].main_grad = self._gradient_placeholders[index]  # type: ignore[attr-defined]

    def _begin_overwrite(self, index: int) -> Tensor:
        """The memory of gradient `index`, to be overwritten."""
        if not self._grad_storage.has_memory:
            self._grad_storage.allocate()
            # the padding
            self._grad_storage.flat[self.bucket.slots[-1].stop :].zero_()
        self._is_empty[index] = False
        view = self._full_gradients[index]
        self.parameters[index].main_grad = view  # type: ignore[attr-defined]
        return view

    def take(self, index: int) -> Tensor:
        """The gradient of parameter `index`, to be added to."""
        self._was_added_to[index] = True
        if self._is_empty[index]:
            return self._begin_overwrite(index).zero_()
        return self._full_gradients[index]

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to the gradient of parameter `index`."""
        if self._is_empty[index] and gradient.layout is torch.strided:
            self._was_added_to[index] = True
            self._begin_overwrite(index).copy_(gradient)
        else:
            self.take(index).add_(gradient)

    def forget(self, index: int) -> None:
        """Drop what has come for parameter `index` in this step."""
        if self.stage >= 2 and not self._first_sum:
            slot = self.bucket.slots[index]
            first, last = self.updated_interval
            self.gradients[
                max(first, slot.start) - first : max(first, min(last, slot.stop)) - first
            ].zero_()
        if not self._is_empty[index]:
            self._mark_empty(index)

    def start_sum(self) -> None:
        """Start to sum what was added since the last sum over `ranks`. Reduce-scatter."""
        for index, fresh in enumerate(self._is_empty):
            if fresh:
                self._begin_overwrite(index).zero_()
        self._summing = start_sum_into_own(
            self._grad_storage.flat,
            self.ranks,
            reduce_dtype=self._reduce_dtype,
            tag=2 * self.number + 1,
            label=f"the gradient sum of {self.label}",
        )

    @property
    def holds_scratch(self) -> bool:
        """Whether a sum under way holds memory beside the buffer's own, so that few should be."""
        composed = self.ranks is not None and self.ps.device.type in self.ranks.gloo
        return self.stage >= 2 or self._reduce_dtype is not None or composed

    def wait_sum(self) -> None:
        """Wait for this rank's shard of the sum; stages 2, 3: add it to `gradients` and free the full gradients."""
        if self._summing is None:
            return
        pending = self._summing
        self._summing = None
        shard_sum = pending.wait()
        if self.stage >= 2:
            self.gradients.copy_(shard_sum) if self._first_sum else self.gradients.add_(shard_sum)
            self._first_sum = False
            self._free_gradients()

    @property
    def own_gradients(self) -> Tensor:
        """This rank's shard of `gradients`: `shard_interval`."""
        (start, stop) = self.shard_interval
        (offset, _) = self.updated_interval
        return self.gradients[start - offset : stop - offset]

    def complete(self) -> None:
        """After the step's last sum. HSDP: add up the shards of all copies, all-reduce over `copies`."""
        if self.stage >= 2 and self._first_sum:
            self.gradients.zero_()
        if self.copies is not None:
            all_reduce(self.own_gradients, self.copies)

    def start_gather_gradients(self) -> PendingCollective | None:
        """Stage 0: bring the sums to all ranks: reduce-scatter and all-gather make an all-reduce."""
        if self.stage or self.ranks is None:
            return None
        return start_gather_parts(
            self._grad_storage.flat,
            self.ranks,
            tag=2 * self.number + 1,
            label=f"the gradients of {self.label}",
        )

    def unsum(self, factor: float) -> None:
        """Make of the sums a contribution of this rank to the next: its shard times `factor`, and zeros elsewhere.

        The ranks' contributions add up to the sums again, which takes no other memory and no message.
        """
        self.own_gradients.mul_(factor / (self.copies.size if self.copies is not None else 1))
        if self.stage < 2:
            start, stop = self.shard_interval
            self._grad_storage.flat[:start].zero_()
            self._grad_storage.flat[stop:].zero_()

    def zero(self) -> None:
        """Begin a new step.

        Gradients that operations add to without `take` (`main_grad_of`) are zeroed now; others when they are needed.
        """
        self._first_sum = True
        if self.stage >= 2:
            # left by a backward that was given up
            if self._grad_storage.has_memory:
                self._free_gradients()
            return
        for index, fresh in enumerate(self._is_empty):
            if self._was_added_to[index]:
                self._mark_empty(index)
                self._was_added_to[index] = False
            elif not fresh:
                self._full_gradients[index].zero_()

    # what lies where

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """What of parameters lies inside `updated_interval`, ascending."""
        first, last = self.updated_interval
        inside = []
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            start = max(first, slot.start)
            stop = min(last, slot.stop)
            if start < stop:
                interval = start - slot.start, stop - slot.start
                inside.append(
                    Segment(slot.name, parameter, interval, (start - first, stop - first))
                )
        return tuple(inside)

    def _in_shard(self, intervals: Sequence[Interval]) -> list[Interval]:
        """What of the bucket's intervals lies in this rank's shard; neighbours joined.

        Counted from the first element of `updated_interval`.
        """
        (shard_start, shard_stop) = self.shard_interval
        (offset, _) = self.updated_interval
        inside: list[Interval] = []
        for start, stop in intervals:
            start = max(start, shard_start) - offset
            stop = min(stop, shard_stop) - offset
            if start < stop and inside and inside[-1][1] == start:
                inside[-1] = inside[-1][0], stop
            elif start < stop:
                inside.append((start, stop))
        return inside

    @cached_property
    def counted(self) -> list[Interval]:
        if self.copies is not None and self.copies.rank:
            return []
        # the bucket is cut along these axes, so no rank repeats another's elements
        data_coordinate = self.ps.coordinate | {"dp": 0, "cp": 0, "edp": 0}
        inside: list[Interval] = []
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            layout = layout_of(parameter)
            if layout.owned_by(data_coordinate):
                box = tuple(
                    (0, s.stop - s.start) for s in layout.box(self.ps.coordinate, self.ps.sizes)
                )
                shape = tuple(parameter.shape)
                inside += [(a + slot.start, b + slot.start) for a, b in flat_intervals(shape, box)]
        return self._in_shard(inside)

    def partial(self) -> dict[str, list[Tensor]]:
        """group -> this rank's gradients that are partial sums over it, as views; complete after `finish` only."""
        inside: dict[str, list[Tensor]] = {}
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            for name in layout_of(parameter).gradient_groups[1:]:
                intervals_here = self._in_shard([(slot.start, slot.stop)])
                inside.setdefault(name, []).extend(
                    self.gradients[start:stop] for start, stop in intervals_here
                )
        return inside

    def remove(self) -> None:
        """Give parameters memory of their own with full values; take `main_grad` away."""
        self.gather()
        self.take_weights()
        for parameter, view, kind in zip(
            self.parameters, self._full_weights, self._classes, strict=True
        ):
            parameter.__class__ = kind
            parameter.data = view.clone()
            del parameter.main_grad  # type: ignore[attr-defined]
            # of its slot
            parameter.__dict__.pop("take_main_grad", None)
            owner_changed(parameter)
            if self.stage == 3:
                del parameter.bucket  # type: ignore[attr-defined]


def sum_views(views: Sequence[Tensor], group: Group | None) -> None:
    """All-reduce scattered views in one call."""
    if group is None or not views:
        return
    joined = all_reduce(torch.cat(list(views)), group)
    for view, values in zip(views, joined.split([v.numel() for v in views]), strict=True):
        view.copy_(values)


def unsum(
    buffers: Sequence[Buffer],
    partial: Mapping[str, Sequence[Tensor]],
    ps: ParallelState,
    *,
    averaged: bool,
) -> None:
    """After the sums: let each rank have a part that adds up to them; see `Buffer.unsum`. No collective.

    partial: as of `partial_views`. averaged: they have been divided by the number of replicas.
    """
    for buffer in buffers:
        buffer.unsum(float(ps.size("dp-cp")) if averaged else 1.0)
    for name, views in partial.items():
        if (group := ps.group(name)) is not None:
            for view in views:
                view.div_(group.size)


def partial_views(buffers: Sequence[Buffer]) -> dict[str, list[Tensor]]:
    """group -> gradients that are partial sums over it."""
    inside: dict[str, list[Tensor]] = {}
    for buffer in buffers:
        for name, views in buffer.partial().items():
            inside.setdefault(name, []).extend(views)
    return {name: inside[name] for name in sorted(inside)}
