"""The norm of gradients that are cut over ranks, which of them were not finite when a step was skipped, and whether
ranks update by the same options."""

from collections.abc import Sequence

import torch
from torch import Tensor

from core.data_parallel import Buffer
from core.optimizer.step.grad_norm import shard_squares, sum_in_rank_order
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.environment import HostCopy, reading_waits
from core.parallel_state.state import ParallelState

READ_EVERY = 64  # steps between two looks at an accelerator's flags, which are copied to the host meanwhile


class GradientWatch:
    """Sums squares; remembers, for the last skipped step, whose gradients on this rank were not finite.

    On a CPU values may be looked at in every step; an accelerator is never waited for before `non_finite`.
    """

    def __init__(self, buffers: Sequence[Buffer], ps: ParallelState) -> None:
        self._buffers, self._ps = buffers, ps
        self._eager = not reading_waits(ps.device)
        # (parameter name, buffer, first, last): the elements that this rank counts in the norm, by parameter
        self._slices: list[tuple[str, Buffer, int, int]] = []
        for buffer in buffers:
            for first, last in buffer.counted:
                for segment in buffer.segments:
                    start, stop = segment.span
                    if start < last and first < stop:
                        self._slices.append((segment.name, buffer, max(start, first), min(stop, last)))
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
        names = {name for (name, *_), finite in zip(self._slices, is_finite, strict=True) if not finite}
        reports = []
        for rank, rank_names in enumerate(all_gather_objects(sorted(names), self._ps.world)):
            reports += [f"{name} on rank {rank}" for name in rank_names]
        return reports

    def reason_of_skip(self) -> str:
        """Why the last skipped step was skipped, for people; collective as `non_finite`."""
        if names := self.non_finite():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            return f"the gradient is not finite in {', '.join(names[:3])}{more}"
        return "every gradient is finite, but not their norm over num_tokens (0 tokens, or an overflow of the sum)"

    def _norms_by_parameter(self) -> Tensor:
        views = [buffer.gradients[first:last] for _, buffer, first, last in self._slices]
        if not views:
            return self._norms
        dtype = views[0].dtype if views[0].dtype.itemsize >= 4 else torch.float32
        if self._eager:
            return torch.stack([torch.linalg.vector_norm(view, dtype=dtype) for view in views]).double()
        return torch.stack(torch._foreach_norm(views, 2, dtype=dtype)).double()


class Agreement:
    """Refuses steps for which ranks that hold the same parameters were told different things.

    Two numbers per rank travel with the gradient norm. Options in param_groups differ where a rate came from one
    rank's loss; what was done to `p.grad` differs where its values did.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._ps = ps
        self._messages = (_OTHER_OPTIONS, _OTHER_GRADIENTS)
        holders = ("tp-dp-cp", "dp-cp")  # whose numbers must be the same
        first_of = torch.zeros(len(holders), ps.grid.config.world_size, dtype=torch.int64)
        for number, axes in enumerate(holders):
            for ranks in ps.grid.all_groups(axes):
                first_of[number, list(ranks)] = ranks[0]
        self._first = first_of.to(ps.device)  # [2, ranks]: with whom each rank is compared
        self._differed = torch.zeros_like(self._first, dtype=torch.bool)
        self._flag: HostCopy | None = None  # of an accelerator, under way

    def message(self, missing_bits: Tensor, options_number: float, changes_by_hand: Tensor) -> Tensor:
        """`missing_bits`, and this rank's two numbers; 0 of options that lie on a device."""
        options = missing_bits.new_full((1,), options_number)
        return torch.cat((missing_bits, options, changes_by_hand.reshape(1)))

    def _any_differed(self, step: int) -> bool:
        """Whether ranks differed in any step so far; of an accelerator what was known `READ_EVERY` steps ago."""
        if not reading_waits(self._ps.device):
            return bool(self._differed.any())
        if step % READ_EVERY:
            return False
        before, self._flag = self._flag, HostCopy(self._differed.any())
        return before is not None and bool(before.read())

    def compare(self, rows: Sequence[Tensor], step: int) -> None:
        """Raises ValueError, on every rank, before the update."""
        if len(rows) == 1:
            return
        numbers = torch.stack(list(rows))[:, -2:].t()
        self._differed |= numbers != numbers.gather(1, self._first)
        if self._any_differed(step):
            which, rank = self._differed.nonzero()[0].tolist()
            holder = int(self._first[which, rank])
            raise ValueError(f"step {step + 1}: {self._messages[which].format(rank=rank, holder=holder)}")


_OTHER_OPTIONS = (
    "the options in param_groups (lr, weight_decay ...) of rank {rank} are not those of rank {holder}, which holds "
    "the same parameters or parts of them. A rate must be the same on all: give a scheduler the loss of all ranks "
    "(averaged over get_data_parallel_group() and the pipeline), not one rank's"
)
_OTHER_GRADIENTS = (
    "rank {rank} has put other values into p.grad, or changed it by other numbers, than rank {holder}, which trains "
    "the same parameters on other data; each would update its part by its own. Draw noise with one seed on both, sum "
    "what comes of a rank's own loss over parallel_state.get_data_parallel_group(), or change gradients inside of "
    "backward by parameter.register_hook, before they are summed"
)
