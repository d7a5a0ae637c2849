"""What every executor of a step shares: batches, microbatches, how a module is called, the result."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.parallel_state.by_hand.batches import followed_as
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives import Group, all_gather_objects
from core.parallel_state.random import mix32
from core.pipeline.run.arguments import ForwardArguments, forward_arguments

# tensors are [b, ...]; see split_microbatches for the rest
Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
# (output, microbatch) -> (loss_sum, num_tokens)
LossFn = Callable[[Any, Any], tuple[Tensor, Tensor | float]]


@dataclass(frozen=True, eq=False)
class StepResult:
    """Global sums over all data replicas and microbatches: float64 tensors of shape [], equal on every rank.

    `float(...)` waits for the device; `optimizer.step(num_tokens=result.num_tokens)` does not.
    """

    loss_sum: Tensor
    num_tokens: Tensor

    @property
    def loss(self) -> Tensor:
        """The mean loss of a valid token (NaN without any)."""
        return self.loss_sum / self.num_tokens


def forward_seed(seed: int, forward: int) -> int:
    """Of the forward-only call number `forward` since the last step: dropout that stays on draws anew in each."""
    return mix32(seed, "forward", forward) if forward else seed


def stage_seed(seed: int, step: int, microbatch: int, stage: int = 0, context: int = 0) -> int:
    """The seed of a module that draws from torch's own generator; `microbatch` is the global index.

    context: the context rank, which holds other tokens than the others.
    """
    parts = ("context", context) if context else ()
    return mix32(seed, "stage", stage, step, microbatch, *parts)


def call_stage(
    module: nn.Module, microbatch: Batch, arguments: ForwardArguments | None = None
) -> Any:
    """Call `module` on a microbatch: a tensor or tuple positionally, a mapping by the names forward takes.

    Entries that forward does not take (a loss mask, say) are left for the loss. `arguments` spares looking
    at the signature again.
    Raises ValueError: a mapping of which forward takes nothing.
    """
    if isinstance(microbatch, Mapping):
        if arguments is None:
            arguments = forward_arguments(module)
        if arguments.looks_in is not None:
            arguments.look(microbatch)
        keywords = {name: microbatch[name] for name in arguments if name in microbatch}
        if not keywords:
            raise ValueError(
                f"{type(module).__name__}.forward takes {len(arguments)} names ({', '.join(arguments)}), none of the "
                f"batch's {len(microbatch)} ({', '.join(map(str, microbatch))}); rename the batch's entries"
            )
        return module(**keywords)
    if isinstance(microbatch, tuple):
        return module(*microbatch)
    return module(microbatch)


def call_next_stage(
    module: nn.Module, received: Any, microbatch: Any, arguments: ForwardArguments
) -> Any:
    """Call a stage on the previous stage's output: a tensor, a tuple (positionally) or a mapping (by name).

    A stage whose forward names none of a mapping's entries, `forward(self, state)`, is given the mapping itself.
    Everything else that its forward takes by name comes from the microbatch, where that is a mapping.
    """
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(received, Mapping):
        keywords = dict(received)
        if (
            arguments
            and not arguments.takes_any
            and not any(name in arguments for name in keywords)
        ):
            positional, keywords = (keywords,), {}
    # an empty mapping is an argument like any other
    if not keywords and not positional:
        positional = received if isinstance(received, tuple) else (received,)
    # what arrived goes before the batch: tokens of the batch must not replace an activation
    if isinstance(microbatch, Mapping):
        if arguments.looks_in is not None:
            arguments.look(name for name in microbatch if name not in keywords)
        unfilled = arguments[len(positional) :]
        keywords = {name: microbatch[name] for name in unfilled if name in microbatch} | keywords
    return module(*positional, **keywords)


def call_loss_fn(loss_fn: LossFn, output: Any, microbatch: Any) -> tuple[Tensor, Tensor | float]:
    """`loss_fn(output, microbatch)`, checked: (loss_sum, num_tokens).

    Raises ValueError: it is not a pair of a loss of one number, in a tensor, and a count.
    """
    result = loss_fn(output, microbatch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"loss_fn returned {type(result).__name__}, not 2 values; return (sum of the losses, number of tokens), "
            "as in `return loss.sum(), loss.numel()`"
        )
    loss = result[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"that is a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            kind = f"of shape {tuple(loss.shape)}"
        raise ValueError(f"loss_fn returned a loss {kind}, not 1 number in a tensor; sum it")
    if isinstance(loss, SplitTensor) and (follower := loss.seen_by()) is not None:
        follower.returned(loss, result[1])
    return result


def check_loss(loss_sum: Tensor, num_tokens: Tensor | float) -> bool:
    """Whether the loss has a gradient. Raises ValueError: a constant over valid tokens."""
    # a constant is fine where everything is masked; `float` waits for the device, in this rare case only
    if not loss_sum.requires_grad and float(num_tokens):
        raise ValueError(
            f"loss_fn returned a loss over {float(num_tokens):g} tokens that depends on 0 trainable parameters; do "
            "not detach it, and call step outside of no_grad"
        )
    return loss_sum.requires_grad


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Around a backward inside a user's mixed-precision autocast, which is meant for the forward."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def scale_like(loss: Tensor, scale: float | Tensor) -> Tensor:
    """The gradient that backward starts with: `scale` in the shape and dtype of a loss.

    A tensor is not read here, so that the device is not waited for.
    """
    if isinstance(scale, Tensor):
        return scale.detach().to(loss.device, loss.dtype).expand(loss.shape).contiguous()
    return torch.full_like(loss, scale, requires_grad=False)


def loss_and_tokens(loss_sum: Tensor, num_tokens: Tensor | float, device: torch.device) -> Tensor:
    """[2] float64: loss and tokens of a microbatch, detached."""
    # filled in on the device, which is no copy from the host
    if not isinstance(num_tokens, Tensor):
        num_tokens = torch.full((), num_tokens, dtype=torch.float64, device=device)
    # float64: sums over millions of tokens stay exact enough to compare layouts by
    scalars = [
        value.detach().to(device, torch.float64).reshape(()) for value in (loss_sum, num_tokens)
    ]
    return torch.stack(scalars)


def join_outputs(outputs: list[Any]) -> Any:
    """The microbatches' outputs as one: tensors joined along dim 0; anything else must be the same in all.

    Raises ValueError: a tensor without dims, other values in another microbatch.
    """

    def join(*values: Any) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            if len(values) == 1:
                return first
            if not first.dim():
                raise ValueError(
                    f"the model returned a tensor without dims for each of {len(values)} microbatches, which cannot "
                    "be joined; return rows [b, ...], or use num_microbatches=1"
                )
            return torch.cat(values)
        if any(type(other) is not type(first) or other != first for other in values[1:]):
            raise ValueError(
                f"the model returned {first!r} beside its tensors for the first of {len(values)} microbatches, and "
                "other values after it, which cannot be joined; return tensors [b, ...]"
            )
        return first

    structures = [pytree.tree_structure(output) for output in outputs]
    if any(structure != structures[0] for structure in structures):
        raise ValueError(
            f"the model returned other nestings in {len(outputs)} microbatches, such as lists of other lengths, "
            "which cannot be joined; return tensors [b, ...]"
        )
    return pytree.tree_map(join, *outputs)


def split_microbatches(batch: Batch, num_microbatches: int) -> list[Any]:
    """Cut every tensor [b, ...] of a batch along dim 0 into views [b/n, ...]; same structure n times.

    Inside mappings and tuples what has b rows is cut too, as are numpy arrays and lists of b entries. All else is
    whole in every microbatch. Raises ValueError: b does not divide, or differs between tensors.
    """
    if isinstance(batch, list):
        raise ValueError(
            f"the batch is a list of {len(batch)}; give a tensor, a tuple (positionally) or a mapping (by name)"
        )
    # all tensors of the outermost level must agree; deeper ones are cut if they have as many rows
    sizes = {key: value.shape[0] for key, value in _entries(batch) if _has_rows(value)}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the batch's tensors have different sizes along dim 0: {sizes}; all must have one. What "
            "is no row of the batch (class weights, tables) the module or loss_fn keeps"
        )
    size = rows_of(batch) or 0
    if num_microbatches < 1 or size % num_microbatches or not size:
        divisors = [count for count in range(1, size + 1) if size % count == 0]
        raise ValueError(
            f"a batch of {size} samples does not divide into num_microbatches={num_microbatches}; use one of "
            f"{divisors}, or a multiple of {max(1, num_microbatches)} samples"
        )
    rows = size // num_microbatches
    return [_cut_rows(batch, index * rows, rows, size) for index in range(num_microbatches)]


def _entries(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    if not isinstance(batch, tuple):
        batch = (batch,)
    return list(enumerate(batch))


def _cut_rows(value: Any, first: int, count: int, size: int) -> Any:
    """Rows first .. first + count of whatever has `size` of them; anything else as it is."""
    if _has_rows(value):
        if value.shape[0] == size:
            return _view_rows(value, first, count)
        return value
    if isinstance(value, Mapping):
        entries = {key: _cut_rows(inner, first, count, size) for key, inner in value.items()}
        if type(value) is dict:
            return entries
        return _mapping_like(value, entries)
    if isinstance(value, tuple):
        elements = [_cut_rows(inner, first, count, size) for inner in value]
        if hasattr(value, "_fields"):  # a namedtuple
            return type(value)(*elements)
        return tuple(elements)
    one_entry_per_row = isinstance(value, list) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )
    if one_entry_per_row and len(value) == size:
        return value[first : first + count]
    return value


def _mapping_like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Hugging Face's BatchEncoding and the like; a plain dict where that cannot be made of one."""
    try:
        return type(mapping)(entries)  # type: ignore[call-arg]
    except TypeError:
        return entries


def _view_rows(value: Tensor, first: int, count: int) -> Tensor:
    # `.data` gives each microbatch a version counter of its own: a module that writes into one in place must not
    # make autograd and R believe that all the others were written as well
    view = value.narrow(0, first, count)
    # the user wants the gradient of the input itself
    if value.requires_grad:
        return view
    return followed_as(value, view.data)


def rows_of(batch: Batch | None) -> int | None:
    """Rows of the first tensor that is cut into microbatches; None without one."""
    candidates = [value for _, value in _entries(batch) if _has_rows(value)] or pytree.tree_leaves(
        batch
    )
    return next((value.shape[0] for value in candidates if _has_rows(value)), None)


def microbatches_of_all(batch: Batch | None, group: Group | None, num_microbatches: int) -> int:
    """Into how many any number of rows is cut. All-gather over pp: ranks without a batch follow those with one."""
    rows_per_rank = all_gather_objects(rows_of(batch), group)
    # where no rank has a batch, the number of microbatches stays as it is
    known_rows = {rows for rows in rows_per_rank if rows is not None} or {num_microbatches}
    if len(known_rows) > 1:
        raise ValueError(
            f"the pipeline ranks' batches have {rows_per_rank} rows; give all the same, or None"
        )
    # the number of rows divides by this, so all microbatches have equally many
    return gcd(*known_rows, num_microbatches)


def evaluation_microbatches(batch: Batch | None, num_microbatches: int) -> int:
    """Into how many microbatches a batch of any size is cut for a forward without backward: at most so many."""
    # the greatest common divisor divides any number of rows, and stays within the schedule's microbatches
    return gcd(rows_of(batch) or num_microbatches, num_microbatches)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients; then every module is in the mode in which it was.

    Of a model in eval mode all parts stay as they are: its program may have put dropouts back to train (MC dropout).
    """
    modes = [(module, module.training) for module in model.modules()]
    if model.training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
