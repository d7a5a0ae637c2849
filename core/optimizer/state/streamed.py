"""Updates chunk by chunk through scratch memory, where one fused call over everything is not possible.

That is so for gradients of another dtype than the main weights, for weights without main weights (stochastic
rounding), for states of 8 bits, and for offloaded ones: gradient device -> host, fused update on the host, weights
host -> device. On an accelerator the next gradients and the last weights travel on a side stream meanwhile
(prefetch).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.optimizer.state.flat_shard import ElementRun, Span, UpdateKey, clip_runs
from core.optimizer.state.kernels import Batch, Factor
from core.optimizer.state.state_buffers import StateBuffer

# elements: gradients, main weights and moments of a chunk fit into a core's cache
CHUNK = 1 << 18
# elements, on an accelerator or over a bus to it: large, because each kernel and copy has a latency
FAR_CHUNK = 1 << 22
Update = Callable[[Batch, Factor, UpdateKey], None]
Round = Callable[[Tensor, StateBuffer, Span], Tensor]


@dataclass(eq=False)
class _StreamedChunk:
    """Elements `span` of a state buffer under way: gradients in the main weights' dtype, and main weights."""

    state_buffer: StateBuffer
    span: Span
    slot: int
    gradients: Tensor
    mains: Tensor
    arrival: Any = None


class Streamer:
    """Two slots of scratch per dtype and use; allocated at first use, then reused.

    One side stream carries both directions in order: when something has arrived in a slot, what was sent from that
    slot before has left it.
    """

    def __init__(self, device: torch.device, update: Update, rounding: Round) -> None:
        self._device = device
        self._update = update
        self._round = rounding
        # states in host memory are behind a bus
        self._remote = device.type != "cpu"
        self._scratch: dict[tuple, Tensor] = {}
        self._side_stream: Any = None

    def run(self, state_buffers: Sequence[StateBuffer], dtype: torch.dtype, factor: Factor) -> None:
        """Update them; `dtype` of the main weights. Waits for an accelerator if states are in host memory."""
        any_behind_bus = any(self._behind_bus(state_buffer) for state_buffer in state_buffers)
        host_factor = factor
        if any_behind_bus:
            self._enter_side_stream()
            host_factor = factor.on_cpu()
        work = []
        for state_buffer in state_buffers:
            work += [(state_buffer, span) for span in self._spans(state_buffer)]
        if work:
            fetched = [self._fetch(*work[0], 0, dtype)]
        else:
            fetched = []
        for number, (state_buffer, _) in enumerate(work, 1):
            chunk = fetched.pop()
            # prefetch the next chunk while this one is updated
            if number < len(work):
                fetched.append(self._fetch(*work[number], number % 2, dtype))
            if chunk.arrival is not None:
                chunk.arrival.synchronize()
            self._update_chunk(chunk, host_factor if self._behind_bus(state_buffer) else factor)
            self._store(chunk)
        if any_behind_bus:
            self._leave_side_stream()

    def _enter_side_stream(self) -> None:
        if self._side_stream is None:
            self._side_stream = torch.Stream(self._device)
        # gradients must be complete before they are copied
        self._side_stream.wait_stream(torch.accelerator.current_stream(self._device))

    def _leave_side_stream(self) -> None:
        # the next forward must not read weights that are still on their way
        torch.accelerator.current_stream(self._device).wait_stream(self._side_stream)

    def _send(self, target: Tensor, source: Tensor) -> None:
        """Copy on the side stream; the host goes on."""
        target.copy_(source, non_blocking=True)

    def _behind_bus(self, state_buffer: StateBuffer) -> bool:
        return self._remote and not state_buffer.resident

    def _spans(self, state_buffer: StateBuffer) -> list[Span]:
        total = state_buffer.stop - state_buffer.start
        if self._remote:
            size = FAR_CHUNK
        else:
            size = CHUNK
        return [(first, min(first + size, total)) for first in range(0, total, size)]

    def _update_chunk(self, chunk: _StreamedChunk, factor: Factor) -> None:
        first, last = chunk.span
        states = chunk.state_buffer.read_states(chunk.span)
        # one fused call per key and chunk
        runs_of: dict[UpdateKey, list[ElementRun]] = {}
        for run in clip_runs(chunk.state_buffer.runs, first, last):
            runs_of.setdefault(run.key, []).append(run)
        for key, runs in runs_of.items():
            self._update(Batch.cut(runs, chunk.mains, chunk.gradients, states), factor, key)
        chunk.state_buffer.write_states(chunk.span, states)

    def _fetch(
        self, state_buffer: StateBuffer, span: Span, slot: int, dtype: torch.dtype
    ) -> _StreamedChunk:
        """Start to bring gradients, and main weights that do not exist in memory of their own, into scratch."""
        size = span[1] - span[0]
        elements = slice(*span)
        gradients = self._scratch_for("gradient", slot, state_buffer, dtype, size)
        copies = [(gradients, state_buffer.gradients[elements])]
        if state_buffer.main is not None:
            mains = state_buffer.main[elements]
        elif state_buffer.wide and state_buffer.resident:
            # float32 weights on the device are their own main weights: updated in place
            mains = state_buffer.weights[elements]
        else:
            mains = self._scratch_for("main", slot, state_buffer, dtype, size)
            copies.append((mains, state_buffer.weights[elements]))
        if not self._behind_bus(state_buffer):
            for target, source in copies:
                target.copy_(source)
            return _StreamedChunk(state_buffer, span, slot, gradients, mains)
        with self._side_stream:
            for target, source in copies:
                self._send(target, source)
            arrival = self._side_stream.record_event()
        return _StreamedChunk(state_buffer, span, slot, gradients, mains, arrival)

    def _store(self, chunk: _StreamedChunk) -> None:
        """Write the updated main weights to the weights, rounded if these are narrower."""
        state_buffer = chunk.state_buffer
        mains = chunk.mains
        if state_buffer.wide and state_buffer.resident:
            return  # the weights themselves were updated
        weights = state_buffer.weights[slice(*chunk.span)]
        if not state_buffer.wide and state_buffer.main is None:
            mains = self._round(mains, state_buffer, chunk.span)
        if not self._behind_bus(state_buffer):
            weights.copy_(mains)
            return
        if not state_buffer.wide:
            # rounded on the host, so that half the bytes travel
            rounded = self._scratch_for(
                "weight", chunk.slot, state_buffer, weights.dtype, weights.numel()
            )
            mains = rounded.copy_(mains)
        with self._side_stream:
            self._send(weights, mains)

    def _scratch_for(
        self, use: str, slot: int, state_buffer: StateBuffer, dtype: torch.dtype, size: int
    ) -> Tensor:
        on_host = self._behind_bus(state_buffer)
        key = (use, slot, dtype, on_host)
        scratch = self._scratch.get(key)
        if scratch is None or scratch.numel() < size:
            if on_host:
                device = torch.device("cpu")
            else:
                device = self._device
            # copies from pageable memory would not be asynchronous
            pinned = on_host and self._device.type != "cpu"
            scratch = torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
            self._scratch[key] = scratch
        return scratch[:size]
