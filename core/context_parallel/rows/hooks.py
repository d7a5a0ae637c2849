"""Follows hidden states that a program's hooks take out of a model whose rows lie over context ranks.

`layer.register_forward_hook` gives a program this rank's rows, [s/cp, b, h]: pooled over dim 0 they are a rank's
part. Only modules with such hooks are looked at, and only in the forwards that `RowSums` follows.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from core.context_parallel.rows.gradients import GradientRows, axes_of_rows
from core.context_parallel.rows.replaced import mixed_since, takes_inside
from core.parallel_state.by_hand import is_foreign, replaced_forward
from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.split_tensor import SplitTensor
from core.parallel_state.collectives import Group, all_gather
from core.parallel_state.layout import layout_of


class Listener:
    """A hook of ours between forwards; copies of the model, and files, have one that does nothing."""

    def __init__(self, call: Callable[[nn.Module, tuple, Any], None] | None) -> None:
        self._call = call

    def __call__(self, part: nn.Module, args: tuple, output: Any) -> None:
        if self._call is not None:
            self._call(part, args, output)

    def __deepcopy__(self, memo: dict) -> "Listener":
        return Listener(None)

    def __reduce__(self) -> Any:
        return Listener, (None,)

    @property
    def listens(self) -> bool:
        """Whether it is no copy."""
        return self._call is not None


class HookedRows:
    """Hooks of ours before the program's, for one forward."""

    def __init__(self, gradients: GradientRows) -> None:
        self._handles: list[Any] = []
        self.gradients = gradients
        # whether some rank had hooks of the program's when they were compared last
        self._has_any = False

    def attach(
        self,
        model: nn.Module,
        shares: Collection[int],
        follow: Callable[[Tensor], None],
        check: Callable[[Tensor, str, Tensor | None], None],
        tell: Callable[[str, str], None],
        width: int | None = None,
    ) -> None:
        """Call `follow` with the [rows, b, h] that hooks in `model` will be given; nothing where a part is compiled.

        shares: how many rows there may be; sequence parallelism cuts them once more. check: is called with what the
        hooks return, the name of their part, and what they were given where that is another, or was written into.
        tell: is called with the name of a part and of what a forward that replaces its own does along the rows.
        width: h, where others follow columns [rows, b, h/tp].
        """
        self.detach()
        if is_compiled(model):
            return

        # of each part what its hooks were given last, and how often that was written into
        given: dict[str, tuple[Tensor, int]] = {}
        # of each part with a replaced forward how many nodes autograd had made when its last part inside ended
        ended: dict[str, int] = {}

        # called as forward hooks, whose last argument is the output, and as forward pre-hooks, where it is the inputs
        def mark(name: str, part: nn.Module, *arguments: Any) -> None:
            for x in pytree.tree_leaves(arguments[-1]):
                is_hidden = type(x) is Tensor and x.is_floating_point() and x.dim() == 3
                if is_hidden and len(x) in shares and width in (None, x.shape[2]):
                    follow(x)
                if isinstance(x, SplitTensor):
                    given[name] = x, _version(x)

        def checked(name: str, part: nn.Module, *arguments: Any) -> None:
            before, version = given.pop(name, (None, 0))
            for x in pytree.tree_leaves(arguments[-1]):
                if isinstance(x, Tensor):
                    is_changed = x is not before or _version(x) != version
                    check(x, name, before if is_changed else None)
                    self.gradients.look_at_functions(x)
                    if name in ended and (mixes := mixed_since(x, ended[name])) is not None:
                        tell(name, mixes)

        for name, part in model.named_modules():
            if part is model:
                continue
            hooks = (*part._backward_hooks.values(), *part._backward_pre_hooks.values())
            if any(map(is_foreign, hooks)):
                self._listen_backward(part, shares)
            for registered, register in (
                (part._forward_hooks, part.register_forward_hook),
                (part._forward_pre_hooks, part.register_forward_pre_hook),
            ):
                if any(map(is_foreign, (*registered.values(), *replaced_forward(part)))):
                    self._handles.append(register(partial(mark, name), prepend=True))
                    self._handles.append(register(partial(checked, name)))
            self._note_ends(part, name, ended)

    def _note_ends(self, part: nn.Module, name: str, ended: dict[str, int]) -> None:
        """Of the modules inside of a part whose forward a program has replaced."""

        def note(_: nn.Module, args: Any, output: Any) -> None:
            ended[name] = torch.autograd._get_sequence_nr()

        for inside in takes_inside(part):
            self._handles.append(inside.register_forward_hook(note))

    def listen_to_parts(
        self,
        model: nn.Module,
        called: Callable[[nn.Module, tuple, Any], None],
        returned: Callable[[nn.Module, tuple, Any], None],
        *,
        are_split: bool,
    ) -> None:
        """After a forward: let these see what a program calls the model's norms and linears on, until `detach`.

        A logit lens, an early exit. called: while weights are here; returned: what the program gets. are_split:
        tensor ranks split linears, which are left out.
        """
        for part in model.modules():
            weights = [*part._parameters.values()]
            is_leaf = weights and not part._modules and type(part).__module__.startswith("core.")
            if is_leaf and not (are_split and any(map(_is_split, weights))):
                self._handles.append(part.register_forward_hook(Listener(called), prepend=True))
                self._handles.append(part.register_forward_hook(Listener(returned)))

    @staticmethod
    def has_hooks(model: nn.Module) -> bool:
        """Whether a program's hooks, or forwards of its own, are given what its parts take or return."""
        parts = [part for part in model.modules() if part is not model]
        hooks = (
            hook
            for part in parts
            if part._forward_hooks or part._forward_pre_hooks
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        )
        of_each_class = {type(part): part for part in parts if "forward" not in vars(part)}
        own = [part for part in parts if "forward" in vars(part)]
        return any(map(is_foreign, hooks)) or any(
            map(replaced_forward, (*own, *of_each_class.values()))
        )

    def are_hooks_alike(self, model: nn.Module, group: Group, *, looks_again: bool) -> bool:
        """Whether those of the program's are on the same parts on all ranks, not for a log on one. All-gather.

        looks_again: also where no rank had any the last time; without it nothing is sent then.
        """
        if not (looks_again or self._has_any):
            return False
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        names = [
            f"{name}.{kind}.{sum(map(is_foreign, getattr(part, kind).values()))}"
            for name, part in model.named_modules()
            for kind in kinds
            if any(map(is_foreign, getattr(part, kind).values()))
        ]
        names += [name for name, part in model.named_modules() if replaced_forward(part)]
        device = next(model.parameters()).device
        number = torch.tensor([crc32(" ".join(names).encode())], device=device)
        numbers = set(all_gather(number, group).tolist())
        self._has_any = numbers != {crc32(b"")}
        return len(numbers) == 1

    def _listen_backward(self, part: nn.Module, shares: Collection[int]) -> None:
        """Around the program's hooks that get gradients: torch keeps the hooks of a forward for its backward."""

        def begin(_: nn.Module, *gradients: Any) -> None:
            for x in pytree.tree_leaves(gradients):
                if type(x) is Tensor and x.dim() == 3 and len(x) in shares:
                    self.gradients.begin((x,), axes_of_rows(x, 0))

        def end(_: nn.Module, gradients: Any, *rest: Any) -> None:
            self.gradients.end()

        for register in (part.register_full_backward_pre_hook, part.register_full_backward_hook):
            self._handles += [register(begin, prepend=True), register(end)]

    def detach(self) -> None:
        """Take them out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _is_split(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and "tp" in layout_of(parameter).split


def _version(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        # in inference mode nobody counts
        return 0 if x.is_inference() else x._version
