"""A parameter whose memory was freed (ZeRO-3): its shape and its gradient are there, its values must be gathered.

Outside of its unit a program may well read it: `state_dict`, a deep copy, a penalty over all weights, a method that
is not `forward`, a layer that uses another one's weight. Then its bucket is gathered on the spot and lent until the
next step, with a warning the first time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

# what is known of a parameter without its values
_ATTRIBUTES = """
    shape dtype device requires_grad grad is_leaf ndim layout grad_fn _version is_cuda is_cpu is_sparse is_meta
    is_quantized is_nested itemsize nbytes names output_nr retains_grad is_xpu is_mps is_mkldnn is_sparse_csr
    _backward_hooks _post_accumulate_grad_hooks _grad
"""
_METHODS = """
    size dim numel nelement element_size stride is_contiguous is_floating_point is_complex requires_grad_
    register_hook register_post_accumulate_grad_hook get_device storage_offset ndimension is_same_size __len__
    data_ptr untyped_storage is_signed is_conj is_neg
"""
FACTS = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split() if hasattr(Tensor, name)),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(Tensor, name) for name in _METHODS.split()),
}


set_data = Tensor.data.__set__  # type: ignore[attr-defined]


class GatheredParameter(Parameter):
    """The class of a parameter while it is gathered: a write to `.data` leaves no trace, so reading `.data` does."""

    @property
    def data(self) -> Tensor:
        self.bucket.data_was_read = True  # type: ignore[attr-defined]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        set_data(self, value)

    def __deepcopy__(self, memo: dict) -> Parameter:
        memo[id(self)] = copied = Parameter(self.detach().clone(), self.requires_grad)
        return copied


class FreedParameter(Parameter):
    """The class of a parameter while its values are freed; a function that reads them gathers them first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            cls.gather_first(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    @staticmethod
    def gather_first(func: Any, args: Any, kwargs: Any) -> None:
        """Of those that `func` is about to read; also asked by a class of tensors beside which one is read."""
        if func not in FACTS:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if type(leaf) is FreedParameter:
                    leaf.bucket.lend()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict) -> Parameter:
        self.bucket.lend()  # type: ignore[attr-defined]
        memo[id(self)] = copied = Parameter(Tensor.detach(self).clone(), self.requires_grad)
        return copied
