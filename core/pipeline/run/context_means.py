"""What a `loss_func` of Megatron's returns over context ranks: a mean of this rank's rows, or a share of the whole.

Megatron multiplies such a loss by the context ranks, over which gradients are averaged afterwards. That is right
where a script divides its rows' sum by the tokens of all context ranks. Its QuickStart divides by those of the rank's
own rows, which is a mean already. The weights of the rows tell which: together 1, or as many as there are ranks.
"""

import warnings

import torch
from torch import Tensor

from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import Group, all_gather

_REMEDY = (
    "it is taken as a mean of this rank's own rows. If it is a share of the whole, as Megatron takes it, multiply it "
    "by parallel_state.get_context_parallel_world_size()"
)


class ContextMeans:
    """Measured once, at the first loss with a gradient, by one all-gather over the context ranks."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        # None: not measured yet
        self._factor: float | None = None if group is not None else 1.0

    def factor(self, loss: Tensor, losses: Tensor, *, is_counted: bool = False) -> float:
        """By what `loss`, of losses [b, s/cp], is multiplied so that averaged gradients are those of one mean.

        is_counted: it was divided by the tokens that the program returned beside it.
        """
        if self._factor is None and loss.requires_grad:
            self._measure(loss, losses, is_counted=is_counted)
        return self._factor or 1.0

    def _measure(self, loss: Tensor, losses: Tensor, *, is_counted: bool) -> None:
        group = self._group
        assert group is not None
        weight = torch.zeros(1, dtype=torch.float64, device=loss.device)
        is_measured = losses.dim() == 2 and losses.requires_grad
        if is_measured:
            (gradient,) = torch.autograd.grad(loss, losses, retain_graph=True, allow_unused=True)
            if gradient is not None:
                weight += gradient.sum(dtype=torch.float64)
        weights_of_ranks = all_gather(weight, group)
        total = float(weights_of_ranks.sum())
        # a microbatch whose tokens are all masked says nothing; nor do counts of one rank, if others have none
        if is_measured and (total == 0 or (is_counted and not bool(weights_of_ranks.all()))):
            return
        self._factor = float(group.size) if abs(total - 1) < 1e-2 else 1.0
        if self._factor == 1 and abs(total / group.size - 1) > 1e-2:
            weights = "the weights of its rows are not known"
            if is_measured:
                weights = f"its rows weigh {total:.4g} together, neither 1 nor {group.size}"
            returned = "(loss, num_tokens, report)" if is_counted else "(loss, report)"
            warnings.warn(
                f"loss_func returns {returned} over {group.size} context ranks, and {weights}: {_REMEDY}",
                stacklevel=program_level(),
            )
