"""The norm of gradients that are cut over ranks, and which of them were not finite when a step was skipped."""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.data_parallel import Buffer
from core.optimizer.step.grad_norm import shard_squares, sum_in_rank_order
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.environment import reading_waits
from core.parallel_state.state import ParallelState


class GradientWatch:
    """Sums squares; remembers, for the last skipped step, whose gradients on this rank were not finite.

    On a CPU values may be looked at in every step; an accelerator is never waited for before `non_finite`.
    """

    def __init__(self, buffers: Sequence[Buffer], ps: ParallelState) -> None:
        self._buffers = buffers
        self._ps = ps
        self._eager = not reading_waits(ps.device)
        # (parameter name, buffer, first, last): the elements that this rank counts in the norm, by parameter
        self._slices: list[tuple[str, Buffer, int, int]] = []
        for buffer in buffers:
            for first, last in buffer.counted:
                for segment in buffer.segments:
                    start, stop = segment.span
                    if start < last and first < stop:
                        self._slices.append(
                            (segment.name, buffer, max(start, first), min(stop, last))
                        )
        self._norms = torch.zeros(len(self._slices), dtype=torch.float64, device=ps.device)
        self._norms_of_skipped = torch.zeros_like(self._norms)

    def squared_norm(self, message: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Of all true gradients of the model, each counted once: float64, shape [], and every rank's row.

        A row is the rank's own sum, then its `message` (float64, 1-D). One all-gather over the world.
        """
        if self._eager:
            counted = []
            for buffer in self._buffers:
                gradients = buffer.gradients
                counted += [gradients[first:last] for first, last in buffer.counted]
            return sum_in_rank_order(shard_squares(counted, self._ps.device), message, self._ps)
        # on an accelerator norms are taken per parameter at once: `remember` cannot ask whether it will need them
        self._norms = self._norms_by_parameter()
        return sum_in_rank_order(self._norms.square().sum(), message, self._ps)

    def remember(self, found_inf: Tensor) -> None:
        """After the norm, before gradients are overwritten: note the norms by parameter, if the step is skipped."""
        if not self._eager:
            self._norms_of_skipped = torch.where(found_inf, self._norms, self._norms_of_skipped)
        elif found_inf:
            self._norms_of_skipped = self._norms_by_parameter()

    def non_finite(self) -> list[str]:
        """ "name on rank r" of every gradient that was not finite when a step was last skipped.

        Collective: all-gather of objects over the world.
        """
        is_finite = self._norms_of_skipped.isfinite().tolist()
        names = {
            name for (name, *_), finite in zip(self._slices, is_finite, strict=True) if not finite
        }
        reports = []
        for rank, rank_names in enumerate(all_gather_objects(sorted(names), self._ps.world)):
            reports += [f"{name} on rank {rank}" for name in rank_names]
        return reports

    def reason_of_skip(self) -> str:
        """Why the last skipped step was skipped, for people; collective as `non_finite`."""
        if names := self.non_finite():
            if len(names) > 3:
                more = f" and {len(names) - 3} more"
            else:
                more = ""
            return f"the gradient is not finite in {', '.join(names[:3])}{more}"
        return "every gradient is finite, but not their norm over num_tokens (0 tokens, or an overflow of the sum)"

    def _norms_by_parameter(self) -> Tensor:
        views = [buffer.gradients[first:last] for _, buffer, first, last in self._slices]
        if not views:
            return self._norms
        if views[0].dtype.itemsize >= 4:
            dtype = views[0].dtype
        else:
            dtype = torch.float32
        if self._eager:
            return torch.stack(
                [torch.linalg.vector_norm(view, dtype=dtype) for view in views]
            ).double()
        return torch.stack(torch._foreach_norm(views, 2, dtype=dtype)).double()
