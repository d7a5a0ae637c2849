"""How a buffer's elements fall into runs and parts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch.nn import Parameter

from core.data_parallel import Segment
from core.parallel_state.flat import PART_ALIGN, is_vector
from core.parallel_state.layout import Layout, layout_of

Span = tuple[int, int]
Decays = Callable[[str, Layout], bool]


class Key(NamedTuple):
    """What the elements of one fused call share: their group, whether they decay, and how many updates they were
    left out of."""

    group: int
    decays: bool
    behind: int = 0


@dataclass(frozen=True)
class ElementRun:
    """Contiguous elements [start, stop) that one fused call takes as one tensor; those of one key go together."""

    start: int
    stop: int
    key: Key


def default_decays(name: str, layout: Layout) -> bool:
    """Biases and parameters of at most one dim do not decay."""
    return not is_vector(name, layout.shape)


def everything_decays(name: str, layout: Layout) -> bool:
    """`weight_decay_of="all"`, as torch."""
    return True


def make_runs(spans: Iterable[tuple[int, int, Key]]) -> list[ElementRun]:
    """Ascending (start, stop, key) -> as few runs as possible.

    What lies before a run's first multiple of `PART_ALIGN` is a run by itself: kernels treat the elements after the
    last whole vector otherwise, so bits must not depend on where a bucket is cut, and cuts lie at such multiples.
    """
    merged: list[ElementRun] = []
    for start, stop, key in spans:
        if merged and merged[-1].stop == start and merged[-1].key == key:
            start = merged.pop().start
        merged.append(ElementRun(start, stop, key))
    cut: list[ElementRun] = []
    for run in merged:
        head = min(-(-run.start // PART_ALIGN) * PART_ALIGN, run.stop)
        cut += [
            r for r in (ElementRun(run.start, head, run.key), ElementRun(head, run.stop, run.key)) if r.start < r.stop
        ]
    return cut


def clip_runs(runs: Iterable[ElementRun], start: int, stop: int) -> list[ElementRun]:
    """The runs inside [start, stop), as seen from `start`."""
    return [
        ElementRun(max(r.start, start) - start, min(r.stop, stop) - start, r.key)
        for r in runs
        if r.start < stop and start < r.stop
    ]


@dataclass(frozen=True, eq=False)
class ParameterPiece:
    """The elements of one segment inside one part: `at` of the part, `interval` of the parameter's flat form."""

    name: str
    parameter: Parameter
    interval: Span
    at: Span

    @property
    def layout(self) -> Layout:
        """Of the whole parameter."""
        return layout_of(self.parameter)


def pieces_of(segments: Iterable[Segment], start: int, stop: int) -> list[ParameterPiece]:
    """The parts of segments that lie inside [start, stop) of `held`, as seen from `start`."""
    found = []
    for s in segments:
        first, last = max(s.at[0], start), min(s.at[1], stop)
        if first < last:
            offset = s.interval[0] - s.at[0]
            found.append(
                ParameterPiece(s.name, s.parameter, (first + offset, last + offset), (first - start, last - start))
            )
    return found
