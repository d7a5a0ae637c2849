"""A product that is computed only if its value is read: the early stop of a recomputed region.

Of the last linear of a region, backward needs the input and not the product; in the second run the product is
of use only to what follows it, mostly a residual sum, which needs no values for its backward either. So there
the last linear returns a `LazyProduct`: a tensor with shape, dtype and graph, without a value. Operations that only
reshape or sum it return another `LazyProduct`; any other operation computes the value first. Nothing has to be known
about the module.
"""

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from core.autograd.recomputation.first_outputs import magnitudes

aten = torch.ops.aten
_VIEWS = {
    aten.view,
    aten._unsafe_view,
    aten.transpose,
    aten.permute,
    aten.t,
    aten.unsqueeze,
    aten.squeeze,
}
_VIEWS |= {aten.expand, aten.alias, aten.detach, aten.slice, aten.select, aten.clone, aten._to_copy}
_SUMS = {aten.add, aten.sub, aten.mul, aten.div, aten.neg}
_POSTPONED = _VIEWS | _SUMS
_LIKE_FACTORIES = {
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
}


class RegionLinears:
    """The linears of one region: counted in its first run, the last one's product left out in its second.

    was_computed: that product was needed after all; skipping it is not worth another try.
    """

    def __init__(self) -> None:
        self.in_second_run = self.was_computed = False
        # products in the first run, and in the second
        self._counts = [0, 0]
        # of the first run's latest product
        self._shape: tuple[Any, Any, torch.dtype, torch.device] | None = None
        self._lazy_products: list[weakref.ref[LazyProduct]] = []
        # whether both runs are compared, and of what the last product was made: it may have no value
        self.is_compared = False
        self.operands: list[Tensor | None] = []

    def begin_second_run(self) -> None:
        """The second run starts; a graph that is retained may start it several times."""
        self.in_second_run = True
        self.was_computed = False
        self._counts[1] = 0
        self.operands = []
        self._lazy_products = []

    def multiply(
        self,
        product: Callable[[], Tensor],
        operands: Sequence[Tensor] = (),
        collective: bool = False,
    ) -> Tensor:
        """The product of `operands`, or a `LazyProduct`. collective: ranks compute it together."""
        self._counts[self.in_second_run] += 1
        if self.is_compared:
            self.operands = magnitudes(operands)
        # as many as the first run had: this is the last one
        if self.in_second_run and self._shape is not None and self._counts[0] == self._counts[1]:
            shape, stride, dtype, device = self._shape
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return self.make_lazy(meta, device, _unwritten(operands, product), collective)
        y = product()
        if not self.in_second_run:
            self._shape = y.shape, y.stride(), y.dtype, y.device
        return y

    def make_lazy(
        self, meta: Tensor, device: torch.device, compute: Callable[[], Tensor], collective: bool
    ) -> "LazyProduct":
        """A tensor like `meta`, on `device`, whose value `compute` gives if it is asked for."""
        lazy = LazyProduct(meta, device, compute, self)
        lazy._collective = collective
        self._lazy_products.append(weakref.ref(lazy))
        return lazy

    @property
    def has_postponed(self) -> bool:
        """Whether this second run has left any value out."""
        return bool(self._lazy_products)

    def compute_alive(self) -> None:
        """Compute what is still alive, oldest first, but no collective.

        What is alive may differ between ranks, by garbage that one of them has not collected yet: a collective would
        deadlock. Such a product is computed where its value is read, on all ranks alike.
        """
        for ref in self._lazy_products:
            lazy = ref()
            if lazy is not None and not lazy._collective:
                lazy.value()

    def end(self) -> None:
        """The second run is over and its outputs are gone: what is still alive is held elsewhere."""
        # nothing is postponed from now on
        self.in_second_run = False
        self.compute_alive()


# Set while a region runs, and read only inside that run, in the same thread.
linears_of_region: ContextVar[RegionLinears | None] = ContextVar("calls", default=None)


class LazyProduct(Tensor):
    """A tensor whose value is computed when it is read."""

    _meta: Tensor
    _compute: Callable[[], Tensor] | None
    _value: Tensor | None
    _linears: RegionLinears
    _collective: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: Any,
        meta: Tensor,
        device: torch.device,
        compute: Callable[[], Tensor],
        linears_of_region: RegionLinears,
    ) -> "LazyProduct":
        """`meta` gives shape, stride and dtype, on the meta device."""
        lazy: LazyProduct = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        lazy._meta = meta
        lazy._compute = compute
        lazy._value = None
        lazy._linears = linears_of_region
        return lazy

    def value(self) -> Tensor:
        if self._compute is not None:
            self._linears.was_computed = True
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self._value = self._compute()
            self._compute = None
        assert self._value is not None
        return self._value

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # at least one: torch dispatches here only because of it
        lazies = [leaf for leaf in leaves if isinstance(leaf, LazyProduct)]
        state = lazies[0]._linears
        packet = func.overloadpacket
        if state.in_second_run and all(lazy._compute is not None for lazy in lazies):
            if packet in _POSTPONED and kwargs.get("device") is None:
                return _postpone(func, leaves, spec, lazies[0])
            # random numbers are drawn now, as in the first run
            if packet in _LIKE_FACTORIES:
                return _apply(func, [_empty_like(leaf) for leaf in leaves], spec)
            if packet is aten.native_dropout:
                return _postpone_dropout(*args)
        # postponed operations need the value before this write
        if func._schema.is_mutable:
            state.compute_alive()
        values = {id(lazy.value()): lazy for lazy in lazies}
        out = _apply(
            func, [leaf.value() if isinstance(leaf, LazyProduct) else leaf for leaf in leaves], spec
        )
        # in place: the same tensor comes back
        return pytree.tree_map(lambda lazy: values.get(id(lazy), lazy), out)

    # ways to a value that bypass dispatch
    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().numpy(*args, **kwargs)

    def data_ptr(self) -> int:
        return self.value().data_ptr()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.value().clone()


def _apply(func: Any, leaves: list, spec: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def _empty_like(leaf: Any) -> Any:
    if not isinstance(leaf, LazyProduct):
        return leaf
    meta = leaf._meta
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=leaf.device)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, LazyProduct):
        return leaf._meta
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _unwritten(operands: Sequence[Tensor], compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`compute`, which fails if an operand was written since: a frozen weight lets a module write into its input."""
    versions = [tensor._version for tensor in operands]

    def checked() -> Tensor:
        if versions != [tensor._version for tensor in operands]:
            raise RuntimeError("an operand of a postponed operation was overwritten")
        return compute()

    return checked


def _postpone(func: Any, leaves: list, spec: Any, first_lazy: LazyProduct) -> Tensor:
    plain_operands = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, LazyProduct)
    ]

    def compute() -> Tensor:
        value: Tensor = _apply(
            func, [leaf.value() if isinstance(leaf, LazyProduct) else leaf for leaf in leaves], spec
        )
        return value

    meta = first_lazy._meta
    # what torch makes of the shapes, asked of meta tensors, which cost no memory
    if func.overloadpacket not in _SUMS or not all(
        _keeps_shape_and_dtype(leaf, meta) for leaf in leaves
    ):
        meta = _apply(func, [_on_meta(leaf) for leaf in leaves], spec)
    collective = any(isinstance(leaf, LazyProduct) and leaf._collective for leaf in leaves)
    return first_lazy._linears.make_lazy(
        meta, first_lazy.device, _unwritten(plain_operands, compute), collective
    )


def _keeps_shape_and_dtype(leaf: Any, meta: Tensor) -> bool:
    """An operand that changes no shape and no dtype: the common case, and torch's own answer takes 100 us."""
    if isinstance(leaf, Tensor):
        return (
            leaf.shape == meta.shape and leaf.dtype == meta.dtype and leaf.stride() == meta.stride()
        )
    return type(leaf) in (int, float) and meta.is_floating_point()


def _postpone_dropout(x: LazyProduct, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The mask is drawn now, because the generator's state must advance as in the first run."""
    _, mask = aten.native_dropout(_empty_like(x), p, train)
    # torch's own rule: without training nothing is scaled, and p = 1 drops all without dividing by 0
    if not train:
        scale = 1.0
    elif p == 1:
        scale = 0.0
    else:
        scale = 1 / (1 - p)
    linears = x._linears
    product = linears.make_lazy(x._meta, x.device, lambda: x.value() * mask * scale, x._collective)
    return product, mask
