"""A product that is computed only if somebody looks at it: the early stop of a region's second run.

Of the last linear of a region, backward needs the input and not the product; in the second run the product is
of use only to what follows it, mostly a residual sum, which needs no values for its backward either. So there
the last linear returns a `LazyProduct`: a tensor with shape, dtype and graph, without a value. Operations that only
move or sum it return another `LazyProduct`; any other operation computes it then and goes on as usual. Nothing has
to be known about the module.
"""

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_MOVES = {aten.view, aten._unsafe_view, aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze}
_MOVES |= {aten.expand, aten.alias, aten.detach, aten.slice, aten.select, aten.clone, aten._to_copy}
_SUMS = {aten.add, aten.sub, aten.mul, aten.div, aten.neg}
_POSTPONED = _MOVES | _SUMS
_LIKES = {aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like}


class Calls:
    """The linears of one region: counted in its first run, the last one's product left out in its second.

    looked: somebody needed that product after all; it is not worth trying again.
    """

    def __init__(self) -> None:
        self.again = self.looked = False
        self._counts = [0, 0]
        self._shape: tuple[Any, Any, torch.dtype, torch.device] | None = None  # of the first run's latest product
        self._made: list[weakref.ref[LazyProduct]] = []

    def begin_again(self) -> None:
        """The second run starts; a graph that is retained may start it several times."""
        self.again, self.looked, self._counts[1], self._made = True, False, 0, []

    def multiply(
        self, product: Callable[[], Tensor], operands: Sequence[Tensor] = (), collective: bool = False
    ) -> Tensor:
        """The product of `operands`, or what stands for it. collective: ranks compute it together."""
        self._counts[self.again] += 1
        if self.again and self._shape is not None and self._counts[0] == self._counts[1]:
            shape, stride, dtype, device = self._shape
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return self.later(like, device, _unwritten(operands, product), collective)
        y = product()
        if not self.again:
            self._shape = y.shape, y.stride(), y.dtype, y.device
        return y

    def later(
        self, like: Tensor, device: torch.device, make: Callable[[], Tensor], collective: bool
    ) -> "LazyProduct":
        """A tensor like `like` whose value `make` computes if it is asked for."""
        made = LazyProduct(like, device, make, self)
        made._collective = collective
        self._made.append(weakref.ref(made))
        return made

    @property
    def postponed(self) -> bool:
        """Whether any weight gradient was deferred."""
        return bool(self._made)

    def make_all(self) -> None:
        """Compute whatever still lives, oldest first; but no collective: what lives may differ between ranks, by
        garbage that one of them has not collected yet. Whoever looks at such a one later computes it then, on all
        ranks alike."""
        for ref in self._made:
            made = ref()
            if made is not None and not made._collective:
                made.value()

    def end(self) -> None:
        """The second run is over and its outputs are gone: what still lives is held by somebody else."""
        self.again = False  # nothing is postponed from now on
        self.make_all()


# Set while a region runs, and read only inside that run, in the same thread.
calls: ContextVar[Calls | None] = ContextVar("calls", default=None)


class LazyProduct(Tensor):
    """A tensor without a value, until somebody looks."""

    _like: Tensor
    _make: Callable[[], Tensor] | None
    _value: Tensor | None
    _calls: Calls
    _collective: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: Any, like: Tensor, device: torch.device, make: Callable[[], Tensor], calls: Calls
    ) -> "LazyProduct":
        """`like` is on the meta device."""
        made: LazyProduct = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        made._like, made._make, made._value, made._calls = like, make, None, calls
        return made

    def value(self) -> Tensor:
        if self._make is not None:
            self._calls.looked = True
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                self._value = self._make()
            self._make = None
        assert self._value is not None
        return self._value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        laters = [leaf for leaf in leaves if isinstance(leaf, LazyProduct)]
        state, packet = laters[0]._calls, func.overloadpacket
        if state.again and all(later._make is not None for later in laters):
            if packet in _POSTPONED and kwargs.get("device") is None:
                return _postpone(func, leaves, spec, laters[0])
            if packet in _LIKES:  # random numbers are drawn as ever
                return _apply(func, [_blank(leaf) for leaf in leaves], spec)
            if packet is aten.native_dropout:
                return _postpone_dropout(*args)
        if func._schema.is_mutable:  # what was postponed wants the value of before
            state.make_all()
        values = {id(later.value()): later for later in laters}
        out = _apply(func, [leaf.value() if isinstance(leaf, LazyProduct) else leaf for leaf in leaves], spec)
        return pytree.tree_map(lambda made: values.get(id(made), made), out)  # in place: the same tensor comes back

    # ways to a value that pass dispatch by
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


def _blank(leaf: Any) -> Any:
    if not isinstance(leaf, LazyProduct):
        return leaf
    like = leaf._like
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=leaf.device)


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, LazyProduct):
        return leaf._like
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _unwritten(operands: Sequence[Tensor], make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`make`, which fails if an operand was written since: a frozen weight lets a module write into its input."""
    versions = [tensor._version for tensor in operands]

    def checked() -> Tensor:
        if versions != [tensor._version for tensor in operands]:
            raise RuntimeError("an operand of a postponed operation was overwritten")
        return make()

    return checked


def _postpone(func: Any, leaves: list, spec: Any, one: LazyProduct) -> Tensor:
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, LazyProduct)]

    def make() -> Tensor:
        value: Tensor = _apply(
            func, [leaf.value() if isinstance(leaf, LazyProduct) else leaf for leaf in leaves], spec
        )
        return value

    like = one._like
    if func.overloadpacket not in _SUMS or not all(_fits(leaf, like) for leaf in leaves):
        like = _apply(func, [_on_meta(leaf) for leaf in leaves], spec)
    collective = any(isinstance(leaf, LazyProduct) and leaf._collective for leaf in leaves)
    return one._calls.later(like, one.device, _unwritten(others, make), collective)


def _fits(leaf: Any, like: Tensor) -> bool:
    """An operand that changes no shape and no dtype: the common case, and torch's own answer takes 100 us."""
    if isinstance(leaf, Tensor):
        return leaf.shape == like.shape and leaf.dtype == like.dtype and leaf.stride() == like.stride()
    return type(leaf) in (int, float) and like.is_floating_point()


def _postpone_dropout(x: LazyProduct, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The mask is drawn now."""
    _, mask = aten.native_dropout(_blank(x), p, train)
    scale = 1.0 if not train else 0.0 if p == 1 else 1 / (1 - p)
    return x._calls.later(x._like, x.device, lambda: x.value() * mask * scale, x._collective), mask
