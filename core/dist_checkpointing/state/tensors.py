"""Which tensors have a stored form, and numpy's arrays as tensors over the same memory."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from core.dist_checkpointing.format.arrays import STORED_DTYPES


def is_dtensor(tensor: Tensor) -> bool:
    """Told by its attributes: importing torch.distributed.tensor is slow, and who has a DTensor has done it."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def is_sharded(tensor: Any) -> bool:
    """Whether it is torch's ShardedTensor, which FSDP1's sharded state dicts hold."""
    return hasattr(tensor, "local_shards") and hasattr(tensor, "sharding_spec")


def unstorable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be stored as it is, and the remedy; None if it can."""
    # quantized and other wrapper subclasses: their values are made of several tensors
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}, which has no stored form; give plain tensors that it can be made from"
    if tensor.layout is not torch.strided:
        return f"of {tensor.layout}, which has no stored form; give tensor.to_dense(), or its indices and values"
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized or dtype not in STORED_DTYPES:
        return f"of {tensor.dtype}, which has no stored form; known: {', '.join(STORED_DTYPES)}"
    if tensor.is_meta:
        return "on the meta device, it has no values; make it on a device first, with `to_empty`"
    # lazily conjugated or negated: the memory holds other values than the tensor
    if tensor.is_conj() or tensor.is_neg():
        return f"a conjugate or negative view of {dtype}; give tensor.resolve_conj().resolve_neg()"
    return None


def tensor_of(array: np.ndarray) -> Tensor:
    """Over the same memory where `fillable`, else of a copy. Raises ValueError: a type that torch does not have."""
    if type(array) not in (np.ndarray, np.memmap):
        raise ValueError(
            f"a {type(array).__name__} is more than its numbers; give numpy.asarray(array)"
        )
    if array.dtype.kind not in "biufc" or array.dtype.newbyteorder("=").name not in STORED_DTYPES:
        raise ValueError(
            f"a numpy array of {array.dtype} has no stored form; give numbers of a type that torch has"
        )
    return torch.from_numpy(array if fillable(array) else native(array))


def fillable(array: np.ndarray) -> bool:
    """Whether a load may write into it, through torch, which knows no negative strides and no other byte order."""
    torch_strides = all(step >= 0 and step % max(array.itemsize, 1) == 0 for step in array.strides)
    return array.flags.writeable and array.dtype.isnative and torch_strides


def native(array: np.ndarray) -> np.ndarray:
    """A copy in this machine's byte order."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
