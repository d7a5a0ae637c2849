"""The whole layout of ranks as integer arithmetic: no process, no torch, any world size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from core.parallel_state.config import ParallelConfig

# The collective groups a rank may take part in, in the one order in which all ranks create them.
# `dp-cp` sums gradients; `embedding` ties the first and the last stage; `ep`, `edp` are the expert view. `shard` and
# `replicate` are the two axes of `dp-cp`: the ranks that share one copy of what is sharded, and one per copy.
# `ulysses`: the context ranks that exchange heads.
GROUPS = (
    "tp",
    "cp",
    "dp",
    "pp",
    "dp-cp",
    "embedding",
    "ep",
    "edp",
    "shard",
    "replicate",
    "ulysses",
)


@dataclass(frozen=True)
class Grid:
    """Two views of the same ranks: dense (pp dp cp tp) and expert (pp edp ep). `config` must know `data`.

    The dense view is one reshape, `arange(world).reshape(pp, dp, cp, tp)` in the default order. 8 ranks, two each of
    pp, dp and tp:

        pp 0    dp 0: 0 1    dp 1: 2 3      tensor parallel groups are the rows of two, 0 1 | 2 3 | 4 5 | 6 7,
        pp 1    dp 0: 4 5    dp 1: 6 7      data parallel 0 2 | 1 3 | 4 6 | 5 7, pipelines 0 4 | 1 5 | 2 6 | 3 7
    """

    config: ParallelConfig

    @cached_property
    def sizes(self) -> dict[str, int]:
        """axis -> size, the expert axes ep and edp included."""
        return self.config.sizes()

    @cached_property
    def _strides(self) -> dict[str, int]:
        order = self.config.order
        # the innermost axis has stride 1, as in a row-major array
        strides = {}
        stride = 1
        for axis in reversed(order):
            strides[axis] = stride
            stride *= self.sizes[axis]
        return strides

    def coordinate(self, rank: int) -> dict[str, int]:
        """axis -> position of `rank`, for pp dp cp tp ep edp."""
        if not 0 <= rank < self.config.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.config.world_size} ranks")
        coordinate = {
            axis: rank // self._strides[axis] % self.sizes[axis] for axis in self.config.order
        }
        index = self._stage_ranks(coordinate["pp"]).index(rank)
        return coordinate | {"ep": index % self.sizes["ep"], "edp": index // self.sizes["ep"]}

    def rank_at(self, **coordinate: int) -> int:
        """The rank at a dense coordinate; axes left out are 0."""
        return sum(position * self._strides[axis] for axis, position in coordinate.items())

    def _stage_ranks(self, stage: int) -> Sequence[int]:
        """Every rank of a pipeline stage, ascending; their order is the expert view's."""
        first = stage * self._strides["pp"]
        stride = self._strides["pp"]
        if self.config.order[0] == "pp":
            return range(first, first + stride)
        world = range(self.config.world_size)
        return [rank for rank in world if rank // stride % self.sizes["pp"] == stage]

    def _vary(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ascending."""
        first = rank
        # the member with position 0 along all of them
        for axis in axes:
            first -= rank // self._strides[axis] % self.sizes[axis] * self._strides[axis]
        ranks = [first]
        for axis in axes:
            stride = self._strides[axis]
            size = self.sizes[axis]
            ranks = [member + position * stride for member in ranks for position in range(size)]
        return tuple(sorted(ranks))

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks of the group that `rank` belongs to, ascending; a group name, or axes joined by '-'."""
        if group == "embedding":
            stages = self._vary(rank, ("pp",))
            ends = (stages[0], stages[-1]) if len(stages) > 1 else stages
            if rank in ends:
                return ends
            return (rank,)
        if group in ("ep", "edp"):
            coordinate = self.coordinate(rank)
            block = self._stage_ranks(coordinate["pp"])
            ep = self.sizes["ep"]
            if group == "edp":
                return tuple(block[coordinate["ep"] :: ep])
            first = coordinate["edp"] * ep
            return tuple(block[first : first + ep])
        if group in ("shard", "replicate"):
            ranks = self._vary(rank, ("dp", "cp"))
            copy_size = len(ranks) // self.config.replicate
            position = ranks.index(rank)
            if group == "replicate":
                return ranks[position % copy_size :: copy_size]
            first = position // copy_size * copy_size
            return ranks[first : first + copy_size]
        if group == "ulysses":
            ranks = self._vary(rank, ("cp",))
            size = self.config.ulysses_ranks
            first = ranks.index(rank) // size * size
            return ranks[first : first + size]
        if unknown := set(group.split("-")) - set(self.config.order):
            raise ValueError(f"unknown axis {sorted(unknown)}; known: {', '.join(GROUPS)}")
        return self._vary(rank, group.split("-"))

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """name -> ranks of every group of more than one rank that `rank` belongs to, in creation order."""
        members = {name: self.members(rank, name) for name in GROUPS}
        return {name: ranks for name, ranks in members.items() if len(ranks) > 1}

    def all_groups(self, group: str) -> list[tuple[int, ...]]:
        """Every group of that name; they partition the world."""
        seen: dict[tuple[int, ...], None] = {}
        for rank in range(self.config.world_size):
            seen.setdefault(self.members(rank, group))
        return list(seen)

    def table(self) -> str:
        """The rank layout as text, one line per replica of the tensor axis."""
        rows: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.config.world_size):
            coordinate = self.coordinate(rank)
            rows.setdefault((coordinate["pp"], coordinate["dp"], coordinate["cp"]), []).append(rank)
        return "\n".join(
            f"pp {pp}  dp {dp}  cp {cp}  tp 0..{len(ranks) - 1}: ranks {', '.join(map(str, ranks))}"
            for (pp, dp, cp), ranks in rows.items()
        )
