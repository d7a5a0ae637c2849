"""The whole layout of ranks as integer arithmetic: no process, no torch, any world size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from core.parallel_state.config import ParallelConfig

# The collective groups a rank may take part in, in the one order in which all ranks create them.
# `dp-cp` sums gradients; `embedding` ties the first and the last stage; `ep`, `edp` are the expert view. `shard` and
# `replicate` are the two axes of `dp-cp`: the ranks that share one copy of what is sharded, and one per copy.
GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "embedding", "ep", "edp", "shard", "replicate")


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
        return {a: prod(self.sizes[b] for b in order[i + 1 :]) for i, a in enumerate(order)}

    def coordinate(self, rank: int) -> dict[str, int]:
        """axis -> position of `rank`, for pp dp cp tp ep edp."""
        if not 0 <= rank < self.config.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.config.world_size} ranks")
        at = {a: rank // self._strides[a] % self.sizes[a] for a in self.config.order}
        index = self._stage_ranks(at["pp"]).index(rank)
        return at | {"ep": index % self.sizes["ep"], "edp": index // self.sizes["ep"]}

    def rank_at(self, **at: int) -> int:
        """The rank at a dense coordinate; axes left out are 0."""
        return sum(position * self._strides[axis] for axis, position in at.items())

    def _stage_ranks(self, stage: int) -> Sequence[int]:
        """Every rank of a pipeline stage, ascending; their order is the expert view's."""
        first, stride = stage * self._strides["pp"], self._strides["pp"]
        if self.config.order[0] == "pp":
            return range(first, first + stride)
        world = range(self.config.world_size)
        return [r for r in world if r // stride % self.sizes["pp"] == stage]

    def _vary(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ascending."""
        ranks = [rank - sum((rank // self._strides[a] % self.sizes[a]) * self._strides[a] for a in axes)]
        for axis in axes:
            ranks = [r + i * self._strides[axis] for r in ranks for i in range(self.sizes[axis])]
        return tuple(sorted(ranks))

    def members(self, rank: int, group: str) -> tuple[int, ...]:
        """The ranks of the group that `rank` belongs to, ascending; a group name, or axes joined by '-'."""
        if group == "embedding":
            stages = self._vary(rank, ("pp",))
            ends = (stages[0], stages[-1]) if len(stages) > 1 else stages
            return ends if rank in ends else (rank,)
        if group in ("ep", "edp"):
            at = self.coordinate(rank)
            block, ep = self._stage_ranks(at["pp"]), self.sizes["ep"]
            index = at["edp"] * ep
            return tuple(block[index : index + ep] if group == "ep" else block[at["ep"] :: ep])
        if group in ("shard", "replicate"):
            ranks = self._vary(rank, ("dp", "cp"))
            n, i = len(ranks) // self.config.replicate, ranks.index(rank)
            return ranks[i // n * n :][:n] if group == "shard" else ranks[i % n :: n]
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
        at = {r: self.coordinate(r) for r in range(self.config.world_size)}
        rows: dict[tuple[int, int, int], list[int]] = {}
        for rank, c in at.items():
            rows.setdefault((c["pp"], c["dp"], c["cp"]), []).append(rank)
        return "\n".join(
            f"pp {pp}  dp {dp}  cp {cp}  tp 0..{len(ranks) - 1}: ranks {', '.join(map(str, ranks))}"
            for (pp, dp, cp), ranks in rows.items()
        )
