"""What a plain loop around a pipeline gets wrong without an error: a norm of one stage, a DDP over other stages."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand import ByHand, Heard
from core.parallel_state.collectives import all_gather, all_gather_objects
from core.parallel_state.collectives.checks import checksum
from core.parallel_state.collectives.groups import ranks_of
from core.parallel_state.state import ParallelState

SAMPLED = 4  # gradients per rank, the smallest, of which two elements each are looked at
UNIFORM = 1e-4  # relative: rounding aside, one factor for all of them


@dataclass(frozen=True)
class _Elements:
    """The largest elements of a gradient as a pipeline's step left them."""

    parameter: nn.Parameter
    flat: Tensor
    places: Tensor
    before: Tensor

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_Elements":
        assert parameter.grad is not None
        flat = parameter.grad.reshape(-1)
        places = flat.abs().topk(min(2, flat.numel())).indices
        return cls(parameter, flat, places, flat[places])

    def factors(self) -> Tensor:
        """What they were multiplied by since; nothing if the gradient is another tensor now (a sum over replicas)."""
        gradient = self.parameter.grad
        same = gradient is not None and gradient.data_ptr() == self.flat.data_ptr()
        return (self.flat[self.places] / self.before)[: len(self.places) if same else 0]


class ScaleWatch:
    """Compares, over the stages, by what factor gradients were scaled between a step's end and the optimizer's.

    `torch.nn.utils.clip_grad_norm_` on each rank clips by the norm of its own stages: all its gradients by one
    factor, which differs from that of other ranks. A few elements per rank are looked at when an optimizer steps;
    factors are compared at the end of steps 2, 3, 5, 9 ... : one all-gather of one number over the world, then.
    Noise, clipping by value, signs or a rate per parameter change elements by factors of their own, and are nobody's
    concern.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._ps, self._steps = ps, 0
        self._seen: list[_Elements] = []
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
            self._hands.close()

    @torch.no_grad()
    def after_step(self, modules: Sequence[nn.Module]) -> None:
        """Compare what the optimizer's last step saw, and remember the smallest of the new gradients as they are.

        Raises ValueError, on every rank: factors that differ.
        """
        if self._due():
            self._compare()
        self._steps += 1
        self._seen, self._factor = [], None
        if not self._due():
            return
        parameters = {p: None for module in modules for p in module.parameters()}
        found = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
        self._seen = [_Elements.of(p) for p in sorted(found, key=Tensor.numel)[:SAMPLED] if p.numel()]
        if self._hands is None:
            self._hands = _Hands(modules)
        self._hands.open()

    def _due(self) -> bool:
        """After steps 1, 2, 4, 8 ..."""
        return self._steps > 0 and not self._steps & (self._steps - 1)

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                f"LBFGS takes products over all parameters, and sees those of 1 of {self._ps.size('pp')} pipeline "
                "ranks; use an elementwise optimizer (AdamW, SGD), or a pipeline of 1 rank"
            )
        if self._seen and self._factor is None:
            given = {id(p) for group in optimizer.param_groups for p in group["params"]}
            factors = [elements.factors() for elements in self._seen if id(elements.parameter) in given]
            each = torch.cat(factors).double() if factors else torch.empty(0)
            each = each[each.isfinite()]  # of a gradient of zeros nothing can be said
            if each.numel():
                one = (each - each[0]).abs().max() <= UNIFORM * each[0].abs()
                self._factor = torch.where(one, each[:1], torch.nan)

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
    """Listens, between a pipeline's steps 1 and 2, 2 and 3, 4 and 5, 8 and 9 ..., to what is done by hand.

    Norms of several gradients are told: the model's norm is over all stages. So are norms, products and draws of
    weights that tensor ranks split.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._reduced: set[int] = set()  # ids of parameters whose gradients were reduced
        self._by_hand: ByHand | None = ByHand(self._hear, gradients=True)

    def open(self) -> None:
        if self._by_hand is not None:
            self._reduced.clear()
            self._by_hand.open(p for module in self._modules for p in module.parameters())

    def close(self) -> None:
        if self._by_hand is not None:
            self._by_hand.close()

    def _hear(self, heard: Heard) -> None:
        if heard.sees_only_shard:
            self._tell(heard.message(*self._modules))
        elif heard.kind == "reduction" and heard.joined and not heard.of_gradient:
            self._tell(
                f"{heard.name} by hand of several weights is of this rank's stages; sum, or take the largest, over "
                "parallel_state.get_pipeline_model_parallel_group()"
            )
        elif heard.of_gradient and heard.kind == "reduction":
            self._reduced.add(id(heard.parameter))
            if len(self._reduced) > 1 or heard.joined:
                self._tell(
                    "gradients were reduced by hand (norm, max, mean): together they are of this rank's stages. "
                    "core.optimizer.get_grad_norm(parameters) is the model's norm, core.optimizer.clip_grad_norm_ "
                    "clips by it"
                )

    def _tell(self, words: str) -> None:
        if self._by_hand is not None:
            self._by_hand.end()
            self._by_hand = None
        warnings.warn(words, stacklevel=5)


class BatchWatch:
    """Compares, in steps 1, 2, 4, 8 ..., the batches that the pipeline ranks of a replica were given.

    The first stage reads its inputs from one, the last its labels from another: a sampler over all ranks, or a seed
    per rank, pairs inputs with other samples' labels. One all-gather of a few numbers over pp, at the end of such a
    step, when every rank is known to be there.
    """

    def __init__(self, ps: ParallelState) -> None:
        self._group, self._steps, self._told = ps.group("pp"), 0, False
        self._mine: dict[str, list[Any]] | None = None  # name -> dtype, shape, checksum

    def before_step(self, batch: Any) -> None:
        """Note what this rank was given."""
        self._steps += 1
        if self._group is None or self._told or self._steps & (self._steps - 1):
            return
        leaves = pytree.tree_flatten_with_path(batch)[0] if batch is not None else []
        self._mine = {
            pytree.keystr(path): [str(x.dtype), *x.shape, int(checksum(x))]
            for path, x in leaves
            if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.numel()
        }

    def after_step(self) -> None:
        """Warns, once, on all pipeline ranks: tensors of one name and shape that differ."""
        if self._mine is None or self._group is None:
            return
        every, self._mine = all_gather_objects(self._mine, self._group), None
        for first, name in ((rank, name) for rank, told in enumerate(every) for name in told):
            here = every[first][name]
            others = [n for n, told in enumerate(every) if name in told and told[name][:-1] == here[:-1]]
            if differ := [n for n in others if every[n][name] != here]:
                self._told = True
                ranks = self._group.ranks
                warnings.warn(
                    f"the batch{name} of rank {ranks[first]} is not that of rank {ranks[differ[0]]}, and both belong "
                    "to one pipeline: the first stage reads inputs from its own, the last one labels. Give all the "
                    "same (sampler: rank=parallel_state.get_data_parallel_rank(), num_replicas=parallel_state."
                    "get_data_parallel_world_size(), one seed), or None where nothing is read",
                    stacklevel=4,
                )
                return


class LossWatch:
    """Listens to `loss_fn` in a pipeline's first step: a penalty over the modules' weights there counts for the
    stages of the rank that computes the loss, and for no others."""

    def __init__(self, ps: ParallelState, modules: Sequence[nn.Module]) -> None:
        self._modules, self._told = modules, False
        self._by_hand = ByHand(self._hear) if ps.size("pp") > 1 else None

    def around(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """`loss_fn` itself, from the second step on."""
        by_hand, self._by_hand = self._by_hand, None
        if by_hand is None:
            return loss_fn

        def listened(*given: Any) -> Any:
            by_hand.open(p for module in self._modules for p in module.parameters())
            try:
                return loss_fn(*given)
            finally:
                by_hand.close()

        return listened

    def _hear(self, heard: Heard) -> None:
        if heard.kind == "reduction" and not heard.of_gradient and not self._told:
            self._told = True
            warnings.warn(
                f"loss_fn takes a {heard.name} of weights: only those of this rank's stages count, it is called "
                "where the last stage is. Use weight_decay, or call backward() on every rank, after step, for a "
                "penalty of its own stages",
                stacklevel=5,
            )


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
