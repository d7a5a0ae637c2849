"""Gradients of replicated parameters that tensor ranks have parts of: modules of a program's own on its own rows."""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.autograd.gradients import has_main_grad
from core.parallel_state import Layout
from core.parallel_state.by_hand import Heard
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.by_hand.heard import OF_WHOLE_GRADIENT
from core.parallel_state.collectives import Group, all_gather, all_reduce
from core.parallel_state.collectives.checks import fingerprint
from core.parallel_state.layout import has_layout, layout_of, set_layout


def sum_gradients_of_foreign(module: nn.Module, group: Group | None) -> None:
    """For a module applied to sequence shards: what `sum_gradient` does, for parameters of foreign modules.

    Every trainable parameter without a layout gets one, replicated and partial over tp, and a hook that sums its
    gradient in backward. Without this each rank would train a foreign module on its own tokens only.
    """
    for parameter in module.parameters():
        sum_gradient_in_backward(parameter, group)


def sum_gradient_in_backward(parameter: Parameter, group: Group | None) -> None:
    """What `sum_gradients_of_foreign` does, for one parameter."""
    if group is not None and parameter.requires_grad and not has_layout(parameter):
        set_layout(parameter, Layout(tuple(parameter.shape), partial=frozenset({"tp"})))
        parameter.register_hook(_SumGradientHook(parameter, group))


def is_added_up(parameter: Parameter) -> bool:
    """Whether its whole gradient, that of reads beside its module too, is summed over the tensor ranks."""
    is_partial = "tp" in layout_of(parameter).partial
    return is_partial and (has_main_grad(parameter) or _hook_of(parameter) is not None)


def is_replicated(parameter: Parameter) -> bool:
    """Whether each tensor rank has the whole of it."""
    return not {"tp", "ep"} & layout_of(parameter).split.keys()


def first_replicated(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """One trainable parameter of our modules that stands for all that are replicated, which are not listened to."""
    for submodule in module.modules():
        if not type(submodule).__module__.startswith("core."):
            continue
        for name, parameter in submodule.named_parameters(recurse=False):
            if parameter.requires_grad and is_replicated(parameter):
                return [(submodule, name)]
    return []


def counted_once(parameter: Parameter, gradient: Tensor, ranks: int) -> Tensor:
    """Of a read of the whole parameter, alike on each rank: what is to be added to its gradient."""
    hook = _hook_of(parameter)
    if hook is not None:
        return hook.count_once(gradient)
    return gradient / ranks if has_main_grad(parameter) else gradient


def _hook_of(parameter: Parameter) -> "_SumGradientHook | None":
    hooks = (parameter._backward_hooks or {}).values()
    return next((hook for hook in hooks if isinstance(hook, _SumGradientHook)), None)


class Penalties:
    """Numbers that each rank makes of such a parameter: told, once, where a backward comes to one.

    Told as well: gradients that are whole on each rank, and added up over the ranks by hand.
    """

    def __init__(self) -> None:
        self._told = False

    def follow(self, module: nn.Module | None, heard: Heard, over_ranks: bool) -> None:
        """`module` holds the parameter, of which a program has made `heard.result`, or a sum over tensor ranks."""
        if module is None or self._told:
            return
        named = module.named_parameters()
        name = next((name for name, p in named if p is heard.parameter), "a parameter")
        shape = list(heard.parameter.shape)
        if heard.of_gradient and over_ranks and heard.adds:
            self._told = True
            warnings.warn(
                f"{heard.name} by hand adds up the gradient of {name} {shape}, which each tensor rank has whole "
                "already, that of norms under sequence parallelism too: it is as many times too large. Leave it out",
                stacklevel=program_level(),
            )
        elif heard.of_gradient and is_added_up(heard.parameter):
            self._look_at_hook(heard, f"{name} {shape}")
        if heard.of_gradient or heard.result is None or not is_added_up(heard.parameter):
            return

        hook = _hook_of(heard.parameter)

        def tell() -> None:
            if not self._told:
                self._told = True
                warnings.warn(
                    f"a penalty on {name} {shape} counts once on each tensor rank: under "
                    "sequence parallelism its gradient is added up over them. core.tensor_parallel."
                    "full_tensor(parameter) has a gradient that counts once",
                    stacklevel=2,
                )

        # without `heard`, which holds the number whose hook it is
        def reached(gradient: Tensor) -> None:
            if hook is None or hook.owner_sums:
                tell()
            else:
                hook.before_sum = tell

        heard.result.register_hook(reached)

    def _look_at_hook(self, heard: Heard, name: str) -> None:
        """What a program's hook in a backward does with a gradient that its owner sums afterwards."""
        in_backward = torch._C._current_graph_task_id() != -1
        is_of_whole = heard.kind in (*OF_WHOLE_GRADIENT, "product")
        if in_backward and has_main_grad(heard.parameter) and is_of_whole:
            self._told = True
            warnings.warn(
                f"{heard.name} in a hook on the gradient of {name}, which is of this tensor rank's rows "
                "(sequence parallelism) or heads, and summed over the ranks after it: a mask or a factor is right, a "
                "limit or a norm is of a part. Change p.grad after the backward",
                stacklevel=2,
            )


class _SumGradientHook:
    """Sums a gradient over the ranks, unless each has the whole already: of a part that gathers all rows itself.

    Not asked where an owner of `main_grad` sums, once per step: in a backward a rank may have no gradient.
    """

    def __init__(self, parameter: Parameter, group: Group) -> None:
        self._parameter = parameter
        self._group = group
        self._calls = 0
        # an owner that was there before has read the layout
        self._owner_may_sum = not has_main_grad(parameter)
        # None: not known yet
        self._is_whole: bool | None = None
        # of this rank's gradient, before the sum: zeros until there is one that can be judged
        self.numbers = torch.zeros(2, dtype=torch.float64)
        # of the backward under way: what reads of the whole have added, and who wants to know that it sums
        self._counted: Tensor | None = None
        self.before_sum: Callable[[], None] | None = None

    @property
    def owner_sums(self) -> bool:
        """Whether somebody else adds the gradient up, all of it, once per step."""
        return self._owner_may_sum and has_main_grad(self._parameter)

    def count_once(self, gradient: Tensor) -> Tensor:
        """Before a call: what is added to the gradient that it will be given."""
        part = gradient / self._group.size if self.owner_sums else gradient
        self._counted = part if self._counted is None else self._counted + part
        return part

    def __call__(self, gradient: Tensor) -> Tensor | None:
        self._calls += 1
        counted, self._counted = self._counted, None
        before_sum, self.before_sum = self.before_sum, None
        own = gradient if counted is None else gradient - counted
        # in those backwards that a `SplitWatch` asks after
        if not self._calls & (self._calls - 1):
            self.numbers = _numbers_of(own.detach())
        if self.owner_sums:
            return None
        if self._is_whole is None:
            numbers = all_gather(_numbers_of(own.detach())[None], self._group)
            self._is_whole = _are_alike(numbers) if bool(numbers[:, 0].all()) else None
        if self._is_whole:
            self.numbers.zero_()
            return None
        if before_sum is not None:
            before_sum()
        total = all_reduce(own.clone(memory_format=torch.contiguous_format), self._group)
        return total if counted is None else total + counted


def _numbers_of(gradient: Tensor) -> Tensor:
    """[2]; zeros of one that does not vary: a bias under a loss that is a sum counts rows, as many on each rank."""
    first = gradient.reshape(-1)[:1]
    if gradient.numel() != 1 and bool((gradient == first).all()):
        return torch.zeros(2, dtype=torch.float64, device=gradient.device)
    return fingerprint(gradient)


def warn_of_whole_gradients(named: Iterable[tuple[str, Parameter]], group: Group) -> bool:
    """Tell, on all ranks, of a gradient that is summed though every rank has all of it; whether it was told.

    Of the last gradients that the hooks have seen. One small all-gather, if there is such a parameter.
    """
    hooks = {
        name: hook
        for name, parameter in named
        for hook in (parameter._backward_hooks or {}).values()
        if isinstance(hook, _SumGradientHook)
    }
    if not hooks:
        return False
    device = next(iter(hooks.values()))._parameter.device
    numbers = torch.stack([hook.numbers.to(device) for hook in hooks.values()])
    gathered = all_gather(numbers[None], group)
    found = [name for place, name in enumerate(hooks) if _are_alike(gathered[:, place])]
    if found:
        warnings.warn(
            f"{found[0]}{_others(found)}: its gradient is the same on all of tensor ranks {list(group.ranks)}, and "
            f"is added up, {group.size} times too large: under sequence parallelism, parameters without a layout are "
            "taken for used on a rank's rows. Of a part that gathers all rows before them, say that each rank has "
            "the whole where it is made: core.parallel_state.layout.set_layout(parameter, "
            "core.parallel_state.layout.Layout(tuple(parameter.shape)))",
            stacklevel=program_level(),
        )
    return bool(found)


def _are_alike(numbers: Tensor) -> bool:
    """Whether fingerprints [ranks, 2] are of one gradient, not zero: parts of a sum differ in their first places."""
    size = numbers[:, 0].min()
    return bool((size > 0) & ((numbers - numbers[0]).abs().max() <= 1e-6 * size))


def _others(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
