"""Which parameters an update leaves out: those without a gradient on any rank, as torch leaves out a grad of None.

A parameter is without one on a rank if no backward of the step reached it there: frozen meanwhile, unused, or there
was no backward. Where other ranks reached it, their sum is its gradient, as under DDP.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.data_parallel import DataParallel
from core.data_parallel.agreement import BITS
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import without_wrappers
from core.parallel_state.state import ParallelState


class Reached:
    """One bit per parameter, set where this rank has no gradient; the bits travel with the gradient norm.

    left_out: names that the current step leaves out. behind: name -> how many updates it was left out of, because
    Adam's bias correction counts a parameter's own updates.
    """

    def __init__(self, shard: DataParallel, ps: ParallelState) -> None:
        named = shard.named_parameters()
        self._ps = ps
        # of this rank's own names: ranks of one data group have the same ones, in one order
        self._bit_of = {name: number for number, name in enumerate(named)}
        # A table tied over the pipeline's ends has another bit on the other rank; it is never left out, so that both
        # copies stay equal.
        self._tied: set[str] = set()
        self._group_of: dict[str, str] = {}
        for name, parameter in named.items():
            layout = layout_of(parameter)
            self._group_of[name] = layout.gradient_groups[0]
            if "embedding" in layout.partial:
                self._tied.add(name)
        most_parameters = max(all_gather_objects(len(named), ps.world))
        self._num_words = shard.agreement.num_words = -(-most_parameters // BITS)
        self._no_bits = torch.zeros(self._num_words, dtype=torch.float64, device=ps.device)
        self.left_out: frozenset[str] = frozenset()
        self.behind: dict[str, int] = {}

    def message(self, missing: Sequence[str]) -> Tensor:
        """The bits of the parameters that this rank has no gradient of: [num_words] float64."""
        if not missing:
            return self._no_bits
        bit_words = [0] * self._num_words
        for name in missing:
            number, bit = divmod(self._bit_of[name], BITS)
            bit_words[number] |= 1 << bit
        return torch.tensor(bit_words, dtype=torch.float64, device=self._ps.device)

    def update(self, rows: Sequence[Tensor], missing: Sequence[str], found_inf: Tensor) -> bool:
        """Decide who is left out, from every rank's row of the norm. Returns whether update keys have changed.

        Waits for an accelerator only if this rank has parameters without a gradient.
        """
        left_out_before = self.left_out
        if self.behind:
            behind_before = dict(self.behind)
        else:
            behind_before = {}
        if missing:
            self.left_out = frozenset(self._missing_everywhere(rows, missing))
        else:
            self.left_out = frozenset()
        # a skipped step updates nobody: nobody falls behind by it
        if self.left_out and not bool(found_inf):
            for name in self.left_out:
                self.behind[name] = self.behind.get(name, 0) + 1
        if self.left_out != left_out_before:
            return True
        # counts of those that are left out change in every step, and in no key
        remaining = {
            name: count for name, count in self.behind.items() if name not in self.left_out
        }
        return remaining != {
            name: count for name, count in behind_before.items() if name not in self.left_out
        }

    def _missing_everywhere(self, rows: Sequence[Tensor], missing: Sequence[str]) -> list[str]:
        words_of_rank = [[int(word) for word in row[1:].tolist()] for row in rows]
        left_out = []
        for name in missing:
            if name in self._tied:
                continue
            group = self._ps.group(self._group_of[name])
            if group is not None:
                ranks = group.ranks
            else:
                ranks = (self._ps.rank,)
            if len(words_of_rank) == 1:
                holders = words_of_rank
            else:
                holders = [words_of_rank[rank] for rank in ranks]
            number, bit = divmod(self._bit_of[name], BITS)
            if all(bit_words[number] >> bit & 1 for bit_words in holders):
                left_out.append(name)
        return left_out

    def of_all_stages(self) -> dict[str, int]:
        """`behind` of every pipeline rank: a checkpoint holds one for all. All-gather of objects over pp."""
        behind: dict[str, int] = {}
        for stage_behind in all_gather_objects(self.behind, self._ps.group("pp")):
            behind |= stage_behind
        return dict(sorted(behind.items()))

    def load(self, behind: Mapping[str, int]) -> None:
        """Take `behind` of a checkpoint, which may hold other stages' parameters too."""
        counts = {without_wrappers(name): int(count) for name, count in behind.items()}
        self.behind = {name: count for name, count in counts.items() if name in self._bit_of}
        self.left_out = frozenset()
