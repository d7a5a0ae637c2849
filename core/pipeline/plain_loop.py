"""What a plain loop around a pipeline gets wrong without an error: a norm of one stage, a DDP over other stages."""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from core.parallel_state.by_hand import ByHand, Heard
from core.parallel_state.collectives import all_gather
from core.parallel_state.collectives.groups import ranks_of
from core.parallel_state.state import ParallelState


class ScaleWatch:
    """Compares, over the stages, by what factor gradients were scaled between a step's end and the optimizer's.

    `torch.nn.utils.clip_grad_norm_` on each rank clips by the norm of its own stages. One gradient per rank is looked
    at when an optimizer steps; the factors are compared at the end of steps 2, 3, 5, 9 ... : one all-gather of one
    number over the world, then.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._ps, self._steps = ps, 0
        self._seen: tuple[nn.Parameter, Tensor, Tensor, Tensor] | None = (
            None  # its gradient, where largest, the value
        )
        self._factor: Tensor | None = None
        self._hands: _Hands | None = None
        kept = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (watch := kept()) is not None:
                watch._look(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def before_call(self) -> None:
        """Of the pipeline: parameters are plain from here on."""
        if self._hands is not None:
            self._hands.end()

    @torch.no_grad()
    def after_step(self, modules: Sequence[nn.Module]) -> None:
        """Compare what the optimizer's last step saw, and remember the smallest of the new gradients as they are.

        Raises ValueError, on every rank: factors that differ.
        """
        if self._hands is None:
            self._hands = _Hands(modules)
        parameters = {p: None for module in modules for p in module.parameters()}
        if self._due():
            self._compare()
        self._steps += 1
        self._seen, self._factor = None, None
        found = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
        if found and self._due():
            smallest = min(found, key=Tensor.numel)
            flat = smallest.grad.reshape(-1)  # type: ignore[union-attr]
            place = flat.abs().argmax().reshape(1)
            self._seen = smallest, flat, place, flat[place]

    def _due(self) -> bool:
        """After steps 1, 2, 4, 8 ..."""
        return self._steps > 0 and not self._steps & (self._steps - 1)

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if self._seen is not None and self._factor is None:
            parameter, flat, place, before = self._seen
            own = any(p is parameter for group in optimizer.param_groups for p in group["params"])
            # another tensor is a sum over replicas, say
            if own and parameter.grad is not None and parameter.grad.data_ptr() == flat.data_ptr():
                self._factor = (flat[place] / before).double()

    def _compare(self) -> None:
        mine = self._factor if self._factor is not None else torch.full((1,), torch.nan, dtype=torch.float64)
        factors = all_gather(mine.to(self._ps.device), self._ps.world)
        known = factors[factors.isfinite()]
        if known.numel() and known.max() - known.min() > 0.01 * known.max():
            raise ValueError(
                f"gradients were scaled by {known.min().item():.4g} on one rank and by {known.max().item():.4g} on "
                f"another before the optimizer's step {self._steps}: torch.nn.utils.clip_grad_norm_ takes the "
                "norm of one rank's stages; use core.optimizer.clip_grad_norm_, which takes the model's"
            )


class _Hands:
    """Listens, between a pipeline's first step and its second, to what is done by hand with weights and gradients.

    A norm of one stage's gradients and then a write is told: the model's norm is over all stages. So are norms,
    products and draws of weights that tensor ranks split.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._normed = modules, False
        self._by_hand: ByHand | None = ByHand(self._hear, gradients=True)
        self._by_hand.open(p for module in modules for p in module.parameters())

    def end(self) -> None:
        if self._by_hand is not None:
            self._by_hand.end()
            self._by_hand = None

    def _hear(self, heard: Heard) -> None:
        if heard.is_of_part:
            self._tell(heard.words(*self._modules))
        elif heard.of_gradient and heard.kind == "reduction":
            self._normed = True
        elif heard.kind == "write" and self._normed:
            self._tell(
                "gradients were reduced by hand before weights or gradients were written: such a norm is of this "
                "rank's stages. core.optimizer.get_grad_norm(parameters) is the model's, "
                "core.optimizer.clip_grad_norm_ clips by it"
            )

    def _tell(self, words: str) -> None:
        self.end()
        warnings.warn(words, stacklevel=5)


def refuse_other_groups(modules: Sequence[nn.Module], ps: ParallelState) -> None:
    """Raise ValueError for a DistributedDataParallel whose ranks are not the replicas of its stage."""
    group = ps.group("dp-cp")
    mine = group.ranks if group is not None else (ps.rank,)
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel) and (ranks := ranks_of(part.process_group)) != mine:
                raise ValueError(
                    f"DistributedDataParallel averages over ranks {list(ranks)}, the replicas of this stage "
                    f"are {list(mine)}: others hold other stages; use core.data_parallel.DistributedDataParallel, or "
                    "process_group=parallel_state.get_data_parallel_group()"
                )
