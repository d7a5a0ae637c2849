"""Gradient clipping and loss scaling for plain loops over a model that is split over ranks, under torch's names.

torch's own `clip_grad_norm_` and `GradScaler` look at one rank's shard of the gradients: tensor ranks would scale
differently and drift apart, and every pipeline stage would be clipped by a norm of its own. To clip by value needs no
norm: torch's `clip_grad_value_` is elementwise, and right on shards.
"""

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd import has_main_grad
from core.data_parallel.buffers.gradient import (
    BucketGradient,
    ParameterSlot,
    meet,
    request_all,
    slot_of,
)
from core.data_parallel.buffers.norms import global_norms
from core.optimizer.step.grad_norm import shard_squares, sum_in_rank_order
from core.optimizer.step.step_stats import CLIP_EPS
from core.parallel_state import ParallelState, current_state
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_reduce
from core.parallel_state.layout import layout_of, true_part
from core.parallel_state.spread import keep_layouts

# `decoder.layers.7.`, and the number of a stage that is a list of layers itself
_LAYER = re.compile(r"(.*?\.)?\d+\.")

Parameters = nn.Module | Tensor | Iterable[Tensor]


def _as_list(parameters: Parameters) -> list[Tensor]:
    """All parameters, those without a gradient too: which ones have one differs between stages."""
    if isinstance(parameters, nn.Module):
        keep_layouts(parameters)
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    return list(parameters)


def _slots_of(parameters: Sequence[Tensor]) -> list[ParameterSlot]:
    """Where a `DataParallel` keeps the gradients of these parameters; of no `DataParallel` none.

    Raises ValueError: it holds some of them only; gradients that some other object of the program's keeps.
    """
    slots = [slot for slot in map(slot_of, parameters) if slot is not None]
    strange = sum(p.requires_grad for p in parameters) - sum(
        slot.parameter.requires_grad for slot in slots
    )
    if slots and strange:
        raise ValueError(
            f"{strange} of {len(parameters)} parameters have their gradients in p.grad, the others in the buckets of "
            "a DataParallel; clip them apart, or unfreeze all before the DataParallel is made"
        )
    if not slots and any(has_main_grad(p) for p in parameters):
        raise ValueError(
            f"the gradients of {len(parameters)} parameters lie in main_grad, which another object sums; clip by "
            "what made it: OptimizerConfig(clip_grad=...) for a DataParallel"
        )
    if not any(slot.sums.has_executor for slot in slots):
        return slots
    # a program that has changed them has divided them, or is told so before its optimizer's step
    are_own = _are_own(slots)
    if are_own == {True}:
        return []
    if True in are_own or all(slot.sums.changes.is_empty for slot in slots):
        raise ValueError(
            f"the gradients of these {len(slots)} parameters are an executor's sums over tokens, which the step "
            "divides by num_tokens: a norm of them is not that of the model; use OptimizerConfig(clip_grad=...), and "
            "the norm that optimizer.step() returns, or divide them first: p.grad.div_(result.num_tokens)"
        )
    return slots


def _are_own(slots: Sequence[ParameterSlot]) -> set[bool]:
    """Whether gradients are tensors that the program has put in the place of a bucket's."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [slot.parameter.grad for slot in slots]
    return {type(g) is not BucketGradient for g in gradients if g is not None}


def get_grad_norm(
    parameters: Parameters, norm_type: float = 2.0, *, parallel: ParallelState | None = None
) -> Tensor:
    """The norm of all gradients of the model, float64, shape []: every true element counted once, on every layout.

    parameters: this rank's, or a module. norm_type: as torch's; inf is the largest element. The gradients must be
    summed over the data axes already (DDP does it in backward; a `DataParallel` now). One all-gather (inf:
    all-reduce) over the world; of a `DataParallel`'s parameters all-reduces over the data, tensor and pipeline ranks.
    Raises ValueError: see `_slots_of`.
    """
    local_parameters = _as_list(parameters)
    slots = _slots_of(local_parameters)
    if slots:
        ps = slots[0].buffer.ps
    else:
        ps = parallel if parallel is not None else current_state()
    if _any_stage_has_buckets(slots, ps):
        return _norm_in_buckets(slots, norm_type, ps)
    gradients = []
    for parameter in local_parameters:
        layout = layout_of(parameter)
        # of several ranks that hold the same elements one counts them; padded rows count nowhere
        if parameter.grad is None or not layout.owned_by(ps.coordinate):
            continue
        if parameter.grad.is_sparse:
            gradient = parameter.grad.coalesce().values()
        else:
            gradient = true_part(parameter.grad, layout, ps.coordinate, ps.sizes)
        gradients.append(gradient.detach().reshape(-1))
    if norm_type == 2.0:
        return sum_in_rank_order(shard_squares(gradients, ps.device), None, ps)[0].sqrt()
    norms = [
        torch.linalg.vector_norm(gradient, norm_type).double().reshape(1) for gradient in gradients
    ]
    # of a rank that counts nothing
    zero = torch.zeros(1, dtype=torch.float64, device=ps.device)
    if math.isinf(norm_type):
        return all_reduce(torch.cat([zero, *norms]).max().reshape(1), ps.world, "max")[0]
    total = torch.cat([zero, *norms]).pow(norm_type).sum().reshape(1)
    return all_reduce(total, ps.world)[0].pow(1.0 / norm_type)


def _any_stage_has_buckets(slots: Sequence[ParameterSlot], ps: ParallelState) -> bool:
    """Whether this rank's gradients, or of a stage that has none of these parameters another's, lie in buckets."""
    pp = ps.group("pp")
    if pp is None:
        return bool(slots)
    # the number of layers that all of these are of, where others are there as well
    of_layer = float(_are_of_one_layer(slots))
    counts = torch.tensor([float(bool(slots)), of_layer], dtype=torch.float64, device=ps.device)
    has_buckets, of_layers = all_reduce(counts, pp).tolist()
    if of_layers > 1:
        warnings.warn(
            f"a norm of the gradients of one layer of each of {int(of_layers)} pipeline stages counts them together, "
            "as the gradients of one model: torch.nn.utils.clip_grad_norm_ and get_total_norm are right for a layer "
            "that one stage has",
            stacklevel=program_level(),
        )
    return has_buckets > 0


def _are_of_one_layer(slots: Sequence[ParameterSlot]) -> bool:
    """Whether they are all in one numbered part of a stage that has others."""
    layers = {found[0] if (found := _LAYER.match(slot.name)) else "" for slot in slots}
    return len(layers) == 1 and "" not in layers and len(slots) < slots[0].num_slots


@torch.no_grad()
def _norm_in_buckets(slots: Sequence[ParameterSlot], order: float, ps: ParallelState) -> Tensor:
    """The norm of averaged gradients in buckets: each rank's elements, then over the ranks that share them."""
    request_all(slots)
    with_gradient = [slot for slot in slots if slot.parameter.grad is not None]
    meet(with_gradient, f"a norm of order {order}")
    # of a table tied over the pipeline's ends one rank's
    counted = []
    norms = global_norms(with_gradient, order) if with_gradient else []
    for slot, norm in zip(with_gradient, norms, strict=True):
        if (
            "embedding" not in layout_of(slot.parameter).partial
            or ps.coordinate.get("embedding", 0) == 0
        ):
            counted.append(norm)
    own = torch.stack([torch.zeros((), dtype=torch.float64, device=ps.device), *counted])
    if math.isinf(order):
        return all_reduce(own.max().reshape(1), ps.group("pp"), "max")[0]
    return all_reduce(own.pow(order).sum().reshape(1), ps.group("pp"))[0].pow(1.0 / order)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    parallel: ParallelState | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` by the norm of the whole model: the same factor on every rank.

    Returns the norm before clipping; see `get_grad_norm`. Raises RuntimeError, on every rank: a norm that is not
    finite, with `error_if_nonfinite`.
    """
    local_parameters = _as_list(parameters)
    norm = get_grad_norm(local_parameters, norm_type, parallel=parallel)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the model's gradients is {norm.item()}: they cannot be clipped; set "
            "error_if_nonfinite=False to scale by it anyway"
        )
    if slots := _slots_of(local_parameters):
        factor = torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
        for slot in slots:
            if slot.parameter.grad is not None:
                slot.scale(factor)
        return norm
    with_gradient = [parameter for parameter in local_parameters if parameter.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm, foreach)
    return norm


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that skips a step on every rank if any gradient of the model overflowed on one.

    parallel: the layout of ranks; default: the current state. One all-reduce over the world per `unscale_`.
    """

    def __init__(self, *args: Any, parallel: ParallelState | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parallel = parallel

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        """In a pipeline the last stage alone has called `scale`; the others unscale and step as well."""
        if self._scale is None:
            if self._parallel is not None:
                ps = self._parallel
            else:
                ps = current_state()
            self._lazy_init_scale_growth_tracker(ps.device)
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: Any
    ) -> dict[torch.device, Tensor]:
        """found_inf by device, the maximum over all ranks."""
        if any(slot_of(p) is not None for group in optimizer.param_groups for p in group["params"]):
            # gradients in buckets: found_inf is of all ranks already
            return super()._unscale_grads_(optimizer, *args)
        found_inf: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, *args)
        if self._parallel is not None:
            ps = self._parallel
        else:
            ps = current_state()
        flag = torch.zeros(1, dtype=torch.float32, device=ps.device)
        for device_flag in found_inf.values():
            flag = torch.maximum(flag, device_flag.to(ps.device).reshape(1))
        # one rank's overflow skips the step on all, so weights stay equal
        all_reduce(flag, ps.world, "max")
        return {device: flag[0].to(device) for device in found_inf or {ps.device: flag}}
