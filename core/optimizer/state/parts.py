"""From buffers to parts: which elements are updated together, and where their states live."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.data_parallel import Buffer, DataParallel
from core.optimizer.state.flat_shard import ElementRun, Key, ParameterPiece, clip_runs, make_runs, pieces_of
from core.optimizer.state.kernels import Batch
from core.optimizer.state.offload import Offload
from core.parallel_state.layout import Layout, layout_of

CHUNK = 1 << 18  # elements: what a core's cache holds of both
Kinds = Callable[[str, Layout], tuple[str, ...]]
Keys = Callable[[str, Layout], Key | None]  # None: no fused call updates it


@dataclass(eq=False)
class StateBuffer:
    """Elements [start, stop) of one buffer's `held` whose states live in one place.

    runs: what a fused call updates; pieces: whose it is; both as seen from `start`. kinds: name -> its states.
    resident: on the weights' device. main: [stop - start], the float32 copy of 16-bit weights; None where the weights
    are their own main, or where there is none and rounding is stochastic. states: kind -> [stop - start].
    """

    buffer: Buffer
    start: int
    stop: int
    runs: list[ElementRun]
    pieces: list[ParameterPiece]
    kinds: dict[str, tuple[str, ...]]
    resident: bool = True
    main: Tensor | None = None
    states: dict[str, Tensor] = field(default_factory=dict)
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
        """Whether the weights are what is updated."""
        return self.buffer.weights.dtype.itemsize >= 4

    @property
    def updated(self) -> Tensor | None:
        """[stop - start]: the main copy, or weights that are their own; None if there is neither."""
        return self.weights if self.wide else self.main

    @property
    def direct(self) -> bool:
        """Whether one call can update it where it is."""
        main = self.updated
        return self.resident and main is not None and main.dtype == self.buffer.gradients.dtype

    def batches(self) -> dict[Key, Batch]:
        """Its runs by key, as views that stay what they are."""
        main, found = self.updated, {}
        assert main is not None
        for key in dict.fromkeys(run.key for run in self.runs):
            runs = [run for run in self.runs if run.key == key]
            found[key] = Batch.cut(runs, main, self.gradients, self.states)
        return found

    def recut(self, key_of: Keys) -> None:
        """Its runs again, after keys have changed."""
        self.runs = clip_runs(_runs(self.buffer, key_of), self.start, self.stop)

    def take_weights(self) -> None:
        """Where weights are not their rounded main copy any more, somebody else wrote them, and they are what counts.

        By value: `.data` and kernels of one's own leave no trace in version counters. Behind a bus versions must do.
        """
        if self.main is None:
            return
        if not self.resident and self.weights.device != self.main.device:
            now = sum(piece.parameter._version for piece in self.pieces)
            changed, self._versions = self._versions not in (-1, now), now
            if not changed:
                return
        looks = self.weights.device.type == "cpu"  # else everything is written, and nobody waits
        for main, weights in zip(self.main.split(CHUNK), self.weights.split(CHUNK), strict=True):
            rounded = main.to(weights.dtype)
            here = weights.to(main.device)
            if not (looks and torch.equal(rounded, here)):
                main.copy_(torch.where(rounded == here, main, here.to(main.dtype)))

    def needs(self) -> list[str]:
        """The states that some piece has, in a fixed order."""
        return list(dict.fromkeys(kind for piece in self.pieces for kind in self.kinds[piece.name]))


def _runs(buffer: Buffer, key_of: Keys) -> list[ElementRun]:
    keyed = ((s.at, key_of(s.name, layout_of(s.parameter))) for s in buffer.segments)
    return make_runs((*at, key) for at, key in keyed if key is not None)


def make_parts(
    shard: DataParallel,
    *,
    kinds_of: Kinds,
    key_of: Keys,
    offload: Offload | None,
) -> list[StateBuffer]:
    """One part per buffer, or two where an offload's fraction cuts it; without states."""
    parts = []
    for buffer in shard.buffers:
        size = buffer.weights.numel()
        runs = _runs(buffer, key_of)
        kinds = {s.name: kinds_of(s.name, layout_of(s.parameter)) for s in buffer.segments}
        cut = offload.cut(size) if offload is not None else 0
        for first, last in ((0, cut), (cut, size)):
            if first < last:
                pieces = pieces_of(buffer.segments, first, last)
                inside = clip_runs(runs, first, last)
                parts.append(StateBuffer(buffer, first, last, inside, pieces, kinds, resident=first >= cut))
    return parts


def allocate(
    parts: list[StateBuffer], dtype: torch.dtype, offload: Offload | None, rank: int, *, main_params: bool
) -> None:
    """States of zeros, mains that are copies of 16-bit weights; one tensor or file per kind for all that is far."""
    needs = {id(part): ["main"] * (main_params and not part.wide) + part.needs() for part in parts}
    far: dict[str, int] = {}
    for part in parts:
        for kind in () if part.resident else needs[id(part)]:
            far[kind] = far.get(kind, 0) + part.stop - part.start
    pinned = any(part.weights.device.type != "cpu" for part in parts)
    whole = {}
    if offload is not None:
        whole = {k: offload.allocate(n, dtype, f"{k}-rank{rank}", pinned=pinned) for k, n in far.items()}
    for part in parts:
        size, states = part.stop - part.start, {}
        for kind in needs[id(part)]:
            if part.resident:
                states[kind] = torch.zeros(size, dtype=dtype, device=part.weights.device)
            else:
                states[kind], whole[kind] = whole[kind].split((size, whole[kind].numel() - size))
        part.main = states.pop("main", None)
        part.states = states
        if part.main is not None:
            part.main.copy_(part.weights)
