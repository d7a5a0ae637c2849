"""The norm of gradients that are cut over ranks, and which of them were not finite when a step was skipped."""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.data_parallel import Buffer
from core.optimizer.grad_norm import shard_squares, sum_in_rank_order
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.state import ParallelState


class GradientWatch:
    """Sums squares; remembers, for the last skipped step, which parameters' parts on this rank were not finite.

    On a CPU tensors' values are there to be looked at; an accelerator is never waited for before `non_finite`.
    """

    def __init__(self, buffers: Sequence[Buffer], ps: ParallelState) -> None:
        self._buffers, self._ps = buffers, ps
        self._eager = ps.device.type == "cpu"
        self._parts = [
            (s.name, buffer, max(s.at[0], first), min(s.at[1], last))
            for buffer in buffers
            for first, last in buffer.counted
            for s in buffer.segments
            if s.at[0] < last and first < s.at[1]
        ]
        self._latest = torch.zeros(len(self._parts), dtype=torch.float64, device=ps.device)
        self._kept = torch.zeros_like(self._latest)

    def squared_norm(self, beside: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Of all true gradients of the model, each counted once: float64, shape []. One all-gather over the world,
        which brings `beside` (float64, 1-D) of every rank, after one number each."""
        if self._eager:
            counted = (b.gradients[first:last] for b in self._buffers for first, last in b.counted)
            return sum_in_rank_order(shard_squares(counted, self._ps.device), beside, self._ps)
        self._latest = self._norms()
        return sum_in_rank_order(self._latest.square().sum(), beside, self._ps)

    def keep(self, found_inf: Tensor) -> None:
        """After the norm, before gradients are overwritten."""
        if not self._eager:
            self._kept = torch.where(found_inf, self._latest, self._kept)
        elif found_inf:
            self._kept = self._norms()

    def non_finite(self) -> list[str]:
        """ "name on rank r" of every part that was not finite when a step was last skipped. All-gather of objects."""
        finite = self._kept.isfinite().tolist()
        names = {part[0] for part, fine in zip(self._parts, finite, strict=True) if not fine}
        every = enumerate(all_gather_objects(sorted(names), self._ps.world))
        return [f"{name} on rank {rank}" for rank, theirs in every for name in theirs]

    def _norms(self) -> Tensor:
        views = [buffer.gradients[first:last] for _, buffer, first, last in self._parts]
        if not views:
            return self._latest
        dtype = views[0].dtype if views[0].dtype.itemsize >= 4 else torch.float32
        if self._eager:
            return torch.stack([torch.linalg.vector_norm(view, dtype=dtype) for view in views]).double()
        return torch.stack(torch._foreach_norm(views, 2, dtype=dtype)).double()
