"""The norm of gradients that are cut over ranks, which of them were not finite when a step was skipped, and whether
ranks update by the same options."""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.data_parallel import Buffer
from core.optimizer.step.grad_norm import shard_squares, sum_in_rank_order
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


READ_EVERY = 64  # steps, on an accelerator, which is waited for then


class OptionsWatch:
    """Refuses param groups whose options, rates above all, differ between the ranks of one pipeline stage: a rate
    that came from one rank's loss. One number per rank travels with the gradient norm."""

    def __init__(self, ps: ParallelState) -> None:
        self._ps = ps
        first = {rank: ranks[0] for ranks in ps.grid.all_groups("tp-dp-cp") for rank in ranks}
        self._first = torch.tensor([first[rank] for rank in sorted(first)], device=ps.device)
        self._differed = torch.zeros(len(first), dtype=torch.bool, device=ps.device)

    def message(self, beside: Tensor, number: float) -> Tensor:
        """`beside`, and a number that stands for this rank's options; 0 of options that lie on a device."""
        return torch.cat((beside, beside.new_full((1,), number)))

    def compare(self, rows: Sequence[Tensor], step: int) -> None:
        """Raises ValueError, on every rank, before the update."""
        if len(rows) == 1:
            return
        numbers = torch.stack(list(rows))[:, -1]
        self._differed |= numbers != numbers[self._first]
        if (self._ps.device.type == "cpu" or step % READ_EVERY == 0) and self._differed.any():
            rank = int(self._differed.nonzero()[0])
            raise ValueError(
                f"step {step + 1}: the options in param_groups (lr, weight_decay ...) of rank {rank} are not those "
                f"of rank {int(self._first[rank])}, which holds the same parameters or parts of them. A rate must be "
                "the same on all: give a scheduler the loss of all ranks (averaged over get_data_parallel_group() "
                "and the pipeline), not one rank's"
            )
