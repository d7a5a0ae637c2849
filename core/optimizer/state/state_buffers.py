"""From gradient buckets to state buffers: which elements are updated together, and where their states live."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core.data_parallel import Buffer, DataParallel
from core.optimizer.state.flat_shard import (
    ElementRun,
    ParameterShard,
    Span,
    UpdateKey,
    clip_runs,
    make_runs,
    parameter_shards,
)
from core.optimizer.state.kernels import Batch
from core.optimizer.state.offload import Offload
from core.optimizer.state.quantized import (
    QUANTIZED_KINDS,
    QuantizedState,
    Quantizes,
    quantized_spans,
)
from core.parallel_state.layout import Layout, layout_of

# elements: a chunk of main weights and one of weights fit into a core's cache
COMPARE_CHUNK = 1 << 18
# Elsewhere a pass over it takes 50 us (4 TB/s, 6 bytes), ten times the launch of a kernel.
_DEVICE_CHUNK = 1 << 25
KindsOf = Callable[[str, Layout], tuple[str, ...]]
# None: no fused call updates the parameter
KeyOf = Callable[[str, Layout], UpdateKey | None]


@dataclass(eq=False)
class StateBuffer:
    """Main weights and optimizer states of elements [start, stop) of what this rank updates of one bucket.

    runs: what fused calls update; parameter_shards: whose elements they are; both counted from `start`.
    kinds: parameter name -> its states. resident: the states live on the weights' device, not offloaded.
    main: [stop - start], the float32 main (master) weights of 16-bit weights; None where the weights are their own
    main weights, or where there are none and rounding is stochastic. states: kind -> [stop - start]. quantized:
    kind -> a state of 8 bits, in the place of one of `states`.
    """

    buffer: Buffer
    start: int
    stop: int
    runs: list[ElementRun]
    parameter_shards: list[ParameterShard]
    kinds: dict[str, tuple[str, ...]]
    resident: bool = True
    main: Tensor | None = None
    states: dict[str, Tensor] = field(default_factory=dict)
    quantized: dict[str, QuantizedState] = field(default_factory=dict)
    _versions: int = -1

    @property
    def weights(self) -> Tensor:
        """[stop - start], live."""
        return self.buffer.weights[self.start : self.stop].detach()

    @property
    def gradients(self) -> Tensor:
        """[stop - start], of the last `finish`."""
        return self.buffer.gradients[self.start : self.stop]

    @property
    def wide(self) -> bool:
        """Whether the weights have 32 bits or more, so that they are updated themselves."""
        return self.buffer.weights.dtype.itemsize >= 4

    @property
    def updated(self) -> Tensor | None:
        """[stop - start]: the weights, if they are wide, else their main weights; None if there are none."""
        if self.wide:
            return self.weights
        return self.main

    @property
    def direct(self) -> bool:
        """Whether one fused call can update everything where it lies, without scratch memory."""
        main = self.updated
        if main is None or self.quantized:
            return False
        return self.resident and main.dtype == self.buffer.gradients.dtype

    def batches(self) -> dict[UpdateKey, Batch]:
        """Its runs by key, as views that stay valid for all steps."""
        main = self.updated
        assert main is not None
        runs_of: dict[UpdateKey, list[ElementRun]] = {}
        for run in self.runs:
            runs_of.setdefault(run.key, []).append(run)
        gradients = self.gradients
        return {key: Batch.cut(runs, main, gradients, self.states) for key, runs in runs_of.items()}

    def read_states(self, span: Span) -> dict[str, Tensor]:
        """kind -> elements [first, last): live views, but copies of what is quantized, for `write_states`."""
        states = {kind: state[slice(*span)] for kind, state in self.states.items()}
        return states | {kind: state.read(span) for kind, state in self.quantized.items()}

    def write_states(self, span: Span, states: Mapping[str, Tensor]) -> None:
        """Quantize again what `read_states` copied."""
        for kind, state in self.quantized.items():
            state.write(span, states[kind])

    def opened(self) -> "StateBuffer":
        """The same with copies, in host memory, of the states that are quantized; itself if there are none."""
        if not self.quantized:
            return self
        copies = {
            kind: torch.cat([state.read(span).cpu() for span in self._chunks()])
            for kind, state in self.quantized.items()
        }
        return replace(self, states=self.states | copies, quantized={})

    def take_opened(self, opened: "StateBuffer") -> None:
        """Quantize the copies of `opened`, which somebody has written to."""
        for span in self._chunks():
            copies = {kind: opened.states[kind][slice(*span)] for kind in self.quantized}
            self.write_states(span, copies)

    def _chunks(self) -> list[Span]:
        size = self.stop - self.start
        return [
            (first, min(first + COMPARE_CHUNK, size)) for first in range(0, size, COMPARE_CHUNK)
        ]

    def recut(self, key_of: KeyOf) -> None:
        """Compute its runs again, after keys have changed."""
        self.runs = clip_runs(_runs_of(self.buffer, key_of), self.start, self.stop)

    def take_weights(self) -> None:
        """Adopt weights that somebody else wrote: where they are not their rounded main weights, they win.

        Compared by value, because `.data` and users' own kernels leave no trace in version counters. Main weights
        that lie in host memory behind a bus are compared by version instead.
        """
        if self.main is None:
            return
        if not self.resident and self.weights.device != self.main.device:
            versions = sum(shard.parameter._version for shard in self.parameter_shards)
            changed = self._versions not in (-1, versions)
            self._versions = versions
            if not changed:
                return
        # On an accelerator everything is written without asking: a comparison would make the host wait.
        may_compare = self.weights.device.type == "cpu"
        for main, weights in paired_chunks(self.main, self.weights):
            rounded = main.to(weights.dtype)
            current = weights.to(main.device)
            if not (may_compare and torch.equal(rounded, current)):
                torch.where(rounded == current, main, current.to(main.dtype), out=main)

    def state_kinds(self) -> list[str]:
        """The states that some of its parameters have, in a fixed order."""
        kinds: dict[str, None] = {}
        for shard in self.parameter_shards:
            kinds |= dict.fromkeys(self.kinds[shard.name])
        return list(kinds)


def paired_chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of two flat tensors, of a size that is fast where they lie and whose copies take little memory."""
    on_cpu = "cpu" in (first.device.type, second.device.type)
    size = COMPARE_CHUNK if on_cpu else _DEVICE_CHUNK
    return zip(first.split(size), second.split(size), strict=True)


def _runs_of(buffer: Buffer, key_of: KeyOf) -> list[ElementRun]:
    keyed_spans = []
    for segment in buffer.segments:
        key = key_of(segment.name, layout_of(segment.parameter))
        if key is not None:
            keyed_spans.append((*segment.span, key))
    return make_runs(keyed_spans)


def make_state_buffers(
    shard: DataParallel,
    *,
    kinds_of: KindsOf,
    key_of: KeyOf,
    offload: Offload | None,
) -> list[StateBuffer]:
    """One per bucket, or two where an offload's fraction cuts it; states are not allocated yet."""
    state_buffers = []
    for buffer in shard.buffers:
        size = buffer.weights.numel()
        runs = _runs_of(buffer, key_of)
        kinds = {s.name: kinds_of(s.name, layout_of(s.parameter)) for s in buffer.segments}
        if offload is not None:
            offloaded = offload.cut(size)
        else:
            offloaded = 0
        # the first elements are offloaded, the others stay beside the weights
        for start, stop, resident in ((0, offloaded, False), (offloaded, size, True)):
            if start < stop:
                shards = parameter_shards(buffer.segments, start, stop)
                clipped = clip_runs(runs, start, stop)
                state_buffers.append(
                    StateBuffer(buffer, start, stop, clipped, shards, kinds, resident)
                )
    return state_buffers


def allocate_states(
    state_buffers: list[StateBuffer],
    dtype: torch.dtype,
    offload: Offload | None,
    rank: int,
    *,
    main_params: bool,
    quantizes: Quantizes,
) -> None:
    """Fill in states of zeros, and main weights that are copies of 16-bit weights.

    All that is offloaded lies in one tensor (or file) per kind: few large files instead of one per bucket; but for
    quantized states, of which each buffer has its own.
    """
    kinds_needed: dict[int, list[str]] = {}
    for state_buffer in state_buffers:
        _allocate_quantized(state_buffer, dtype, offload, rank, quantizes)
        if main_params and not state_buffer.wide:
            main = ["main"]
        else:
            main = []
        kinds_needed[id(state_buffer)] = main + [
            kind for kind in state_buffer.state_kinds() if kind not in state_buffer.quantized
        ]

    # Step 1: one allocation per kind for everything that is offloaded.
    offloaded_sizes: dict[str, int] = {}
    for state_buffer in state_buffers:
        if not state_buffer.resident:
            for kind in kinds_needed[id(state_buffer)]:
                size = state_buffer.stop - state_buffer.start
                offloaded_sizes[kind] = offloaded_sizes.get(kind, 0) + size
    pinned = any(state_buffer.weights.device.type != "cpu" for state_buffer in state_buffers)
    remaining: dict[str, Tensor] = {}
    if offload is not None:
        for kind, size in offloaded_sizes.items():
            remaining[kind] = offload.allocate(size, dtype, f"{kind}-rank{rank}", pinned=pinned)

    # Step 2: each buffer gets its own tensors, or the next elements of the offloaded ones.
    for state_buffer in state_buffers:
        size = state_buffer.stop - state_buffer.start
        states: dict[str, Tensor] = {}
        for kind in kinds_needed[id(state_buffer)]:
            if state_buffer.resident:
                states[kind] = torch.zeros(size, dtype=dtype, device=state_buffer.weights.device)
            else:
                rest = remaining[kind]
                states[kind], remaining[kind] = rest.split((size, rest.numel() - size))
        state_buffer.main = states.pop("main", None)
        state_buffer.states = states
        if state_buffer.main is not None:
            state_buffer.main.copy_(state_buffer.weights)


def _allocate_quantized(
    state_buffer: StateBuffer,
    dtype: torch.dtype,
    offload: Offload | None,
    rank: int,
    quantizes: Quantizes,
) -> None:
    """The states of a buffer in which anything is quantized."""
    spans = quantized_spans(state_buffer.parameter_shards, quantizes)
    if not spans:
        return
    device = state_buffer.weights.device

    def new(size: int, dtype: torch.dtype, name: str) -> Tensor:
        if state_buffer.resident or offload is None:
            return torch.zeros(size, dtype=dtype, device=device)
        return offload.allocate(size, dtype, f"{name}-rank{rank}", pinned=device.type != "cpu")

    size = state_buffer.stop - state_buffer.start
    for kind in state_buffer.state_kinds():
        if kind in QUANTIZED_KINDS:
            state_buffer.quantized[kind] = QuantizedState(size, spans, dtype, kind, new)


def state_bytes(state_buffers: list[StateBuffer]) -> tuple[int, int]:
    """Bytes of states and main weights: on the weights' device, and offloaded."""
    on_device = offloaded = 0
    for state_buffer in state_buffers:
        tensors = list(state_buffer.states.values())
        for quantized in state_buffer.quantized.values():
            tensors += quantized.tensors
        if state_buffer.main is not None:
            tensors.append(state_buffer.main)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if state_buffer.resident:
            on_device += size
        else:
            offloaded += size
    return on_device, offloaded


def opened(state_buffers: list[StateBuffer]) -> list[StateBuffer]:
    """`StateBuffer.opened` of each."""
    return [state_buffer.opened() for state_buffer in state_buffers]
