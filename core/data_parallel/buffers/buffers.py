"""The memory of one bucket: weights and gradients as flat storages, parameters and `main_grad` views of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import Parameter

from core.data_parallel.weights.weights import Interval, Storage, Weights, gone
from core.parallel_state.collectives import Group, all_reduce, start_gather_parts, start_sum_into_own
from core.parallel_state.collectives.ops import PendingCollective
from core.parallel_state.flat import Bucket, flat_intervals
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of parameters of `dtype` are added up: float32 at least."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a parameter that lies in what a rank updates.

    interval: elements of the parameter's local flat form. span: where they are in `held`.
    """

    name: str
    parameter: Parameter
    interval: Interval
    span: Interval


class Buffer(Weights):
    """One bucket on this rank. Written by `DataParallel`, read by optimizers.

    bucket: where each parameter lies. ranks: the group over which it is cut; copies: the group of ranks that hold
    the same part (HSDP). own: this rank's equal part; held: what its optimizer updates, `own`, or all at stage 0.
    weights, gradients: 1-D, live memory of `held`; gradients are complete after `DataParallel.finish`.
    counted: intervals of `held` whose gradients this rank counts in the norm: every true element on one rank only.
    number: of the bucket, the same on every rank of the group.
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
        self.number, self.bucket, self.ps = number, bucket, ps
        self.parameters = [parameters[slot.name] for slot in bucket.slots]
        dense = bucket.group == "dp-cp"
        self.ranks: Group | None = ps.group("shard" if dense else bucket.group)
        self.copies: Group | None = ps.group("replicate") if dense else None
        # over one rank there is nothing to divide
        self.stage = zero_stage if self.ranks is not None else min(zero_stage, 1)
        self.own = bucket.cut(self.ranks.size, self.ranks.rank) if self.ranks is not None else (0, bucket.size)
        self.held = self.own if self.stage else (0, bucket.size)
        self.dtype = self.parameters[0].dtype
        self.grad_dtype = grad_dtype if grad_dtype is not None else wide(self.dtype)
        narrower = reduce_dtype is not None and reduce_dtype.itemsize < self.grad_dtype.itemsize
        self._wire = reduce_dtype if narrower else None
        self._gathering: PendingCollective | None = None
        self._summing: PendingCollective | None = None
        self._build_weights(ps.device)
        self._build_gradients()

    def _build_gradients(self) -> None:
        size, dtype, device = self.bucket.size, self.grad_dtype, self.ps.device
        flat = torch.zeros(size, dtype=dtype, device=device)
        self._grads = self._views(flat)
        self._gone_grads = [gone(view) for view in self._grads]
        self._grad_storage = Storage(flat)
        # which gradients hold nothing yet: the first contribution overwrites, and no pass of zeros is needed
        self._fresh = [False] * len(self.parameters)
        self._used = [False] * len(self.parameters)  # since the last zero(), by ways that ask before they add
        self._first = True  # stages 2, 3: of the step's sums
        for index, (parameter, view) in enumerate(zip(self.parameters, self._grads, strict=True)):
            parameter.main_grad = view  # type: ignore[attr-defined]
            parameter.take_main_grad = partial(self.take, index)  # type: ignore[attr-defined]
        if self.stage < 2:
            self.gradients = flat[slice(*self.held)]
        else:
            self.gradients = torch.zeros(self.held[1] - self.held[0], dtype=dtype, device=device)
            self._give_back_gradients()

    @property
    def memory(self) -> dict[str, list[Tensor]]:
        """ "weights" and "gradients" -> the flat tensors that hold them, also those whose memory comes and goes."""
        return {
            "weights": [self._storage.flat, self.weights],
            "gradients": [self._grad_storage.flat, self.gradients],
        }

    # gradients

    def _give_back_gradients(self) -> None:
        for index in range(len(self.parameters)):
            self._expect(index)
        self._grad_storage.give_back()

    def _expect(self, index: int) -> None:
        """Nothing is in the gradient of parameter `index`, nor can it be read."""
        self._fresh[index] = True
        self.parameters[index].main_grad = self._gone_grads[index]  # type: ignore[attr-defined]

    def _open(self, index: int) -> Tensor:
        """Its memory, to be overwritten."""
        if not self._grad_storage.there:
            self._grad_storage.take()
            self._grad_storage.flat[self.bucket.slots[-1].stop :].zero_()  # the padding
        self._fresh[index] = False
        view = self._grads[index]
        self.parameters[index].main_grad = view  # type: ignore[attr-defined]
        return view

    def take(self, index: int) -> Tensor:
        """The gradient of parameter `index`, to be added to."""
        self._used[index] = True
        return self._open(index).zero_() if self._fresh[index] else self._grads[index]

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to the gradient of parameter `index`."""
        if self._fresh[index] and gradient.layout is torch.strided:
            self._used[index] = True
            self._open(index).copy_(gradient)
        else:
            self.take(index).add_(gradient)

    def forget(self, index: int) -> None:
        """What has come for parameter `index` in this step is not wanted."""
        if self.stage >= 2 and not self._first:
            slot, (first, last) = self.bucket.slots[index], self.held
            self.gradients[max(first, slot.start) - first : max(first, min(last, slot.stop)) - first].zero_()
        if not self._fresh[index]:
            self._expect(index)

    def start_sum(self) -> None:
        """Sum what was added since the last time over `ranks`. Reduce-scatter."""
        for index, fresh in enumerate(self._fresh):
            if fresh:
                self._open(index).zero_()
        self._summing = start_sum_into_own(
            self._grad_storage.flat,
            self.ranks,
            wire=self._wire,
            tag=2 * self.number + 1,
            what=f"the gradient sum of {self.words}",
        )

    @property
    def holds_scratch(self) -> bool:
        """Whether a sum under way holds memory beside the buffer's own, so that few should be."""
        return self.stage >= 2 or self._wire is not None or (self.ranks is not None and self.ranks.composed)

    def wait_sum(self) -> None:
        """Until the sum of this rank's part is in `gradients`; stages 2, 3: added to it, and whole gradients go."""
        if self._summing is None:
            return
        pending, self._summing = self._summing, None
        own = pending.wait()
        if self.stage >= 2:
            self.gradients.copy_(own) if self._first else self.gradients.add_(own)
            self._first = False
            self._give_back_gradients()

    @property
    def own_gradients(self) -> Tensor:
        """This rank's part of `gradients`, [own]."""
        return self.gradients[self.own[0] - self.held[0] : self.own[1] - self.held[0]]

    def complete(self) -> None:
        """After the step's last sum. HSDP: add up the parts of the copies, all-reduce over `copies`."""
        if self.stage >= 2 and self._first:
            self.gradients.zero_()
        if self.copies is not None:
            all_reduce(self.own_gradients, self.copies)

    def start_gather_gradients(self) -> PendingCollective | None:
        """Stage 0: bring the sums to all ranks. All-gather over `ranks`."""
        if self.stage or self.ranks is None:
            return None
        return start_gather_parts(
            self._grad_storage.flat, self.ranks, tag=2 * self.number + 1, what=f"the gradients of {self.words}"
        )

    def zero(self) -> None:
        """Start over.

        What somebody may have added to without asking (`main_grad_of`) is zeroed now; the rest when it is needed.
        """
        self._first = True
        if self.stage >= 2:
            if self._grad_storage.there:  # of a backward that was given up
                self._give_back_gradients()
            return
        for index, fresh in enumerate(self._fresh):
            if self._used[index]:
                self._expect(index)
                self._used[index] = False
            elif not fresh:
                self._grads[index].zero_()

    # what lies where

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The parts of parameters inside `held`, ascending."""
        first, last = self.held
        found = []
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            start, stop = max(first, slot.start), min(last, slot.stop)
            if start < stop:
                interval = start - slot.start, stop - slot.start
                found.append(Segment(slot.name, parameter, interval, (start - first, stop - first)))
        return tuple(found)

    def _inside(self, intervals: Sequence[Interval]) -> list[Interval]:
        """Those parts of intervals of the bucket that lie in `own`, seen from `held`; neighbours joined."""
        found: list[Interval] = []
        for start, stop in intervals:
            start, stop = max(start, self.own[0]) - self.held[0], min(stop, self.own[1]) - self.held[0]
            if start < stop and found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            elif start < stop:
                found.append((start, stop))
        return found

    @cached_property
    def counted(self) -> list[Interval]:
        if self.copies is not None and self.copies.rank:
            return []
        at = self.ps.coordinate | {"dp": 0, "cp": 0, "edp": 0}  # along which it is cut, not repeated
        found: list[Interval] = []
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            layout = layout_of(parameter)
            if layout.owned_by(at):
                box = tuple((0, s.stop - s.start) for s in layout.box(self.ps.coordinate, self.ps.sizes))
                shape = tuple(parameter.shape)
                found += [(a + slot.start, b + slot.start) for a, b in flat_intervals(shape, box)]
        return self._inside(found)

    def partial(self) -> dict[str, list[Tensor]]:
        """group -> this rank's gradients that are partial sums over it, as views; complete after `finish` only."""
        found: dict[str, list[Tensor]] = {}
        for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True):
            for name in layout_of(parameter).gradient_groups[1:]:
                parts = self._inside([(slot.start, slot.stop)])
                found.setdefault(name, []).extend(self.gradients[start:stop] for start, stop in parts)
        return found

    def remove(self) -> None:
        """Whole parameters in memory of their own; no `main_grad`."""
        self.gather()
        self.take_weights()
        for parameter, view, kind in zip(self.parameters, self._whole, self._classes, strict=True):
            parameter.__class__ = kind
            parameter.data = view.clone()
            del parameter.main_grad, parameter.take_main_grad  # type: ignore[attr-defined]
            if self.stage == 3:
                del parameter.bucket  # type: ignore[attr-defined]


def sum_views(views: Sequence[Tensor], group: Group | None) -> None:
    """All-reduce scattered pieces as one."""
    if group is None or not views:
        return
    whole = all_reduce(torch.cat(list(views)), group)
    for view, part in zip(views, whole.split([v.numel() for v in views]), strict=True):
        view.copy_(part)


def partial_views(buffers: Sequence[Buffer]) -> dict[str, list[Tensor]]:
    """group -> gradients that are partial sums over it."""
    found: dict[str, list[Tensor]] = {}
    for buffer in buffers:
        for name, views in buffer.partial().items():
            found.setdefault(name, []).extend(views)
    return {name: found[name] for name in sorted(found)}
