"""Which elements of a flat buffer are updated together: runs of equal options, and whose elements they are.

All intervals are half-open and counted in elements.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch.nn import Parameter

from core.data_parallel import Segment
from core.parallel_state.flat import PART_ALIGN, is_vector
from core.parallel_state.layout import Layout, layout_of

Span = tuple[int, int]
Decays = Callable[[str, Layout], bool]


class UpdateKey(NamedTuple):
    """What the elements of one fused call share.

    group: number of their param group. decays: whether weight decay applies. behind: how many updates they were left
    out of, so that Adam's bias correction counts from their own first update.
    """

    group: int
    decays: bool
    behind: int = 0


@dataclass(frozen=True)
class ElementRun:
    """Contiguous elements [start, stop) that one fused call takes as one tensor; those of one key go together."""

    start: int
    stop: int
    key: UpdateKey


def default_decays(name: str, layout: Layout) -> bool:
    """Biases and parameters of at most one dim do not decay."""
    return not is_vector(name, layout.shape)


def everything_decays(name: str, layout: Layout) -> bool:
    """`weight_decay_of="all"`, as in torch."""
    return True


def make_runs(keyed_spans: Iterable[tuple[int, int, UpdateKey]]) -> list[ElementRun]:
    """Ascending (start, stop, key) -> as few runs as possible.

    What lies before a run's first multiple of `PART_ALIGN` is a run by itself: kernels treat the elements after the
    last full vector otherwise, so bits must not depend on where a bucket is cut, and cuts lie at such multiples.
    """
    # Step 1: neighbours of one key become one run.
    merged: list[ElementRun] = []
    for start, stop, key in keyed_spans:
        if merged and merged[-1].stop == start and merged[-1].key == key:
            start = merged.pop().start
        merged.append(ElementRun(start, stop, key))
    # Step 2: an unaligned head is split off, so that vector kernels see the same groups of elements on every layout.
    aligned: list[ElementRun] = []
    for run in merged:
        next_multiple = -(-run.start // PART_ALIGN) * PART_ALIGN
        head = min(next_multiple, run.stop)
        if run.start < head:
            aligned.append(ElementRun(run.start, head, run.key))
        if head < run.stop:
            aligned.append(ElementRun(head, run.stop, run.key))
    return aligned


def clip_runs(runs: Iterable[ElementRun], start: int, stop: int) -> list[ElementRun]:
    """The runs inside [start, stop), counted from `start`."""
    clipped = []
    for run in runs:
        if run.start < stop and start < run.stop:
            first = max(run.start, start)
            last = min(run.stop, stop)
            clipped.append(ElementRun(first - start, last - start, run.key))
    return clipped


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """The elements of one parameter inside one state buffer.

    interval: which elements of the parameter's flat form. span: where they lie in the state buffer.
    """

    name: str
    parameter: Parameter
    interval: Span
    span: Span

    @property
    def layout(self) -> Layout:
        """Of the full parameter."""
        return layout_of(self.parameter)


def parameter_shards(segments: Iterable[Segment], start: int, stop: int) -> list[ParameterShard]:
    """What of the segments lies inside [start, stop) of the elements that this rank updates, counted from `start`."""
    shards = []
    for segment in segments:
        first = max(segment.span[0], start)
        last = min(segment.span[1], stop)
        if first < last:
            # from positions in the buffer to elements of the parameter
            shift = segment.interval[0] - segment.span[0]
            interval = (first + shift, last + shift)
            shards.append(
                ParameterShard(
                    segment.name, segment.parameter, interval, (first - start, last - start)
                )
            )
    return shards
