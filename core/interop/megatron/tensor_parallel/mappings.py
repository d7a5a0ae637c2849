"""The conjugate pairs by Megatron's names, over the current state's tensor group."""

from typing import Any

from torch import Tensor

from core import tensor_parallel as ours
from core.parallel_state import current_state
from core.parallel_state.collectives import Group
from core.tensor_parallel.cross_entropy import true_columns


def tensor_group(group: Any = None) -> Group | None:
    """The current tensor group. Raises ValueError: a torch group that is another one."""
    ps = current_state()
    current_group = ps.group("tp")
    if group is not None and current_group is not None and group is not current_group.process_group:
        raise ValueError(
            f"a group of {group.size()} ranks is not the tensor group of {current_group.size}; leave it out"
        )
    return current_group


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Identity; backward sums over the group."""
    return ours.copy_to_tensor_region(input_, tensor_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Sum over the group; backward is the identity."""
    return ours.reduce_from_tensor_region(input_, tensor_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """[..., h] -> [..., h/tp]; backward gathers."""
    return ours.scatter_to_tensor_region(input_, tensor_group(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """[..., h/tp] -> [..., h]; backward takes this rank's columns."""
    return ours.gather_from_tensor_region(input_, tensor_group(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """[s, b, h] -> [s/tp, b, h]; backward gathers."""
    return ours.scatter_to_sequence_region(input_, tensor_group(group))


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Any = None
) -> Tensor:
    """[s/tp, b, h] -> [s, b, h]; backward reduce-scatters where a tensor region follows, else takes its rows."""
    return ours.gather_from_sequence_region(
        input_, tensor_group(group), to_tensor_region=tensor_parallel_output_grad
    )


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """[s, b, h], each rank a part of the sum -> [s/tp, b, h]; backward gathers."""
    return ours.reduce_scatter_to_sequence_region(input_, tensor_group(group))


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
) -> Tensor:
    """Loss per token [...] of logits [..., v/tp].

    label_smoothing: Megatron's, spread over the v - 1 other classes. torch's, over all v, is v / (v - 1) times it.
    """
    group = tensor_group(tp_group)
    if label_smoothing:
        classes = true_columns(vocab_parallel_logits, 1 if group is None else group.size)
        label_smoothing *= classes / (classes - 1)
    return ours.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, group, label_smoothing=label_smoothing
    )
