"""Updates chunk by chunk through scratch: gradients of another dtype, weights without a main copy, far states.

With states in host memory, chunk after chunk: gradient device -> host, fused update on the host, weights host ->
device. On an accelerator the next gradients and the last weights travel on a side stream meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.optimizer.state.flat_shard import Key, Span, clip_runs
from core.optimizer.state.kernels import Batch, Factor
from core.optimizer.state.parts import StateBuffer

CHUNK = 1 << 18  # elements: what a core's cache holds of gradients, mains and moments
FAR_CHUNK = 1 << 22  # over a bus to an accelerator: few messages
Update = Callable[[Batch, Factor, Key], None]
Round = Callable[[Tensor, StateBuffer, Span], Tensor]


@dataclass(eq=False)
class _StreamedChunk:
    """Elements `span` of a part, on their way: gradients as the main parameters are, and mains that are not there."""

    part: StateBuffer
    span: Span
    slot: int
    gradients: Tensor
    mains: Tensor
    arrived: Any = None


class Streamer:
    """Two slots of scratch per dtype and use; made at first use, then kept.

    One side stream carries both ways in order: what arrives in a slot tells that what left it before has gone.
    """

    def __init__(self, device: torch.device, update: Update, rounding: Round) -> None:
        self._device, self._update, self._round = device, update, rounding
        self._remote = device.type != "cpu"  # states in host memory are behind a bus
        self._scratch: dict[tuple, Tensor] = {}
        self._side: Any = None

    def run(self, parts: Sequence[StateBuffer], dtype: torch.dtype, factor: Factor) -> None:
        """Update the parts; `dtype` of the main parameters. Waits for an accelerator if states are in host memory."""
        far = any(self._far(part) for part in parts)
        if far:
            self._begin()
        factors = {True: factor.on_cpu() if far else factor, False: factor}
        spans = [(part, span) for part in parts for span in self._spans(part)]
        ahead = [self._fetch(*spans[0], 0, dtype)] if spans else []
        for number, (part, _) in enumerate(spans, 1):
            chunk = ahead.pop()
            if number < len(spans):  # on its way while this one is updated
                ahead.append(self._fetch(*spans[number], number % 2, dtype))
            if chunk.arrived is not None:
                chunk.arrived.synchronize()
            self._step(chunk, factors[self._far(part)])
            self._put(chunk)
        if far:
            self._end()

    def _begin(self) -> None:
        if self._side is None:
            self._side = torch.Stream(self._device)
        self._side.wait_stream(torch.accelerator.current_stream(self._device))

    def _end(self) -> None:
        torch.accelerator.current_stream(self._device).wait_stream(self._side)

    def _send(self, into: Tensor, source: Tensor) -> None:
        """On the side stream; the host goes on."""
        into.copy_(source, non_blocking=True)

    def _far(self, part: StateBuffer) -> bool:
        return self._remote and not part.resident

    def _spans(self, part: StateBuffer) -> list[Span]:
        total, size = part.stop - part.start, FAR_CHUNK if self._far(part) else CHUNK
        return [(first, min(first + size, total)) for first in range(0, total, size)]

    def _step(self, chunk: _StreamedChunk, factor: Factor) -> None:
        first, last = chunk.span
        states = {kind: state[first:last] for kind, state in chunk.part.states.items()}
        inside = clip_runs(chunk.part.runs, first, last)
        for key in dict.fromkeys(run.key for run in inside):
            runs = [run for run in inside if run.key == key]
            self._update(Batch.cut(runs, chunk.mains, chunk.gradients, states), factor, key)

    def _fetch(self, part: StateBuffer, span: Span, slot: int, dtype: torch.dtype) -> _StreamedChunk:
        """Gradients, and mains that are not there, into scratch."""
        size, here = span[1] - span[0], slice(*span)
        wanted = [(self._room("gradient", slot, part, dtype, size), part.gradients[here])]
        if part.main is not None:
            mains = part.main[here]
        elif part.wide and part.resident:
            mains = part.weights[here]
        else:
            mains = self._room("main", slot, part, dtype, size)
            wanted.append((mains, part.weights[here]))
        if not self._far(part):
            for into, source in wanted:
                into.copy_(source)
            return _StreamedChunk(part, span, slot, wanted[0][0], mains)
        with self._side:
            for into, source in wanted:
                self._send(into, source)
            return _StreamedChunk(part, span, slot, wanted[0][0], mains, self._side.record_event())

    def _put(self, chunk: _StreamedChunk) -> None:
        """Updated mains to the weights."""
        part, mains = chunk.part, chunk.mains
        if part.wide and part.resident:
            return
        weights = part.weights[slice(*chunk.span)]
        if not part.wide and part.main is None:
            mains = self._round(mains, part, chunk.span)
        if not self._far(part):
            weights.copy_(mains)
            return
        if not part.wide:
            mains = self._room("weight", chunk.slot, part, weights.dtype, weights.numel()).copy_(mains)
        with self._side:
            self._send(weights, mains)

    def _room(self, use: str, slot: int, part: StateBuffer, dtype: torch.dtype, size: int) -> Tensor:
        far = self._far(part)
        key = (use, slot, dtype, far)
        found = self._scratch.get(key)
        if found is None or found.numel() < size:
            device = torch.device("cpu") if far else self._device
            pinned = far and self._device.type != "cpu"
            found = self._scratch[key] = torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
        return found[:size]
