"""Which parameters an update leaves out: those without a gradient on any rank, as torch leaves out a grad of None.

A parameter is without one on a rank if no backward of the step reached it there: frozen meanwhile, unused, or there
was no backward. Where other ranks reached it, their sum is its gradient, as under DDP.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import layout_of
from core.parallel_state.state import ParallelState

BITS = 48  # of one float64, which holds whole numbers of 53


class Reached:
    """Bits travel with the gradient norm: one per parameter, set where this rank has no gradient.

    left_out: names, of this step. behind: name -> how many updates it was left out of; Adam's count is its own.
    """

    def __init__(self, shard: DataParallel, ps: ParallelState) -> None:
        self._ps, self._place = ps, {name: i for i, name in enumerate(shard.named_parameters())}
        # a table tied over the pipeline's ends has another number there, and must stay what its twin is
        self._tied = {n for n, p in shard.named_parameters().items() if "embedding" in layout_of(p).partial}
        self._group = {n: layout_of(p).gradient_groups[0] for n, p in shard.named_parameters().items()}
        self._words = -(-max(all_gather_objects(len(self._place), ps.world)) // BITS)
        self._none = torch.zeros(self._words, dtype=torch.float64, device=ps.device)
        self.left_out: frozenset[str] = frozenset()
        self.behind: dict[str, int] = {}

    def message(self, missing: Sequence[str]) -> Tensor:
        """What this rank tells the others: [words] float64."""
        if not missing:
            return self._none
        words = [0] * self._words
        for name in missing:
            words[self._place[name] // BITS] |= 1 << self._place[name] % BITS
        return torch.tensor(words, dtype=torch.float64, device=self._ps.device)

    def hear(self, rows: Sequence[Tensor], missing: Sequence[str], found_inf: Tensor) -> bool:
        """What each rank told, after its part of the norm. Returns whether keys may have changed.

        Waits for an accelerator only if this rank has parameters without a gradient.
        """
        before = self.left_out, dict(self.behind) if self.behind else {}
        self.left_out = frozenset(self._left_out(rows, missing)) if missing else frozenset()
        if self.left_out and not bool(found_inf):
            for name in self.left_out:
                self.behind[name] = self.behind.get(name, 0) + 1
        return self.left_out != before[0] or {n: b for n, b in self.behind.items() if n not in self.left_out} != {
            n: b for n, b in before[1].items() if n not in self.left_out
        }

    def _left_out(self, rows: Sequence[Tensor], missing: Sequence[str]) -> list[str]:
        told = [[int(word) for word in row[1:].tolist()] for row in rows]
        found = []
        for name in missing:
            group = self._ps.group(self._group[name])
            ranks = group.ranks if group is not None else (self._ps.rank,)
            word, bit = divmod(self._place[name], BITS)
            here = told if len(told) == 1 else [told[rank] for rank in ranks]
            if name not in self._tied and all(words[word] >> bit & 1 for words in here):
                found.append(name)
        return found

    def of_all_stages(self) -> dict[str, int]:
        """`behind` of every pipeline rank: a checkpoint holds one for all. All-gather over pp."""
        found: dict[str, int] = {}
        for theirs in all_gather_objects(self.behind, self._ps.group("pp")):
            found |= theirs
        return dict(sorted(found.items()))

    def load(self, behind: Mapping[str, int]) -> None:
        """Of a checkpoint, which may hold other stages' too."""
        self.behind = {name: int(n) for name, n in behind.items() if name in self._place}
        self.left_out = frozenset()
