"""One module, or the several stages of a pipeline that live on this rank, taken alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.spread import keep_layouts

Modules = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]  # a mapping names the stages
T = TypeVar("T", bound=Tensor)
_Named = Callable[[nn.Module, str], Iterator[tuple[str, T]]]


def modules_of(modules: Modules) -> dict[int, nn.Module]:
    """stage (or position) -> module, ascending."""
    if isinstance(modules, nn.Module):
        return {0: modules}
    return dict(sorted(modules.items())) if isinstance(modules, Mapping) else dict(enumerate(modules))


def named_parameters(modules: Modules) -> Iterator[tuple[str, Parameter]]:
    """Every parameter once, by its global name, each with the layout that its module knows (`keep_layouts`).

    Stages of our models say that their names are global (`stacks`): layer 7 is `layers.7` on every stage. Names of
    other stages in a mapping start with `stages.N.`, so that a checkpoint can tell them apart on all ranks; those in
    a list do where two different parameters have the same name.
    """
    for module in modules_of(modules).values():
        keep_layouts(module)
    return _named(modules, lambda module, prefix: module.named_parameters(prefix))


def named_buffers(modules: Modules) -> Iterator[tuple[str, Tensor]]:
    """Every buffer that belongs to the modules' state once, named as parameters are."""
    parts = (part for module in modules_of(modules).values() for part in module.modules())
    aside = {id(part._buffers[name]) for part in parts for name in part._non_persistent_buffers_set}
    found = _named(modules, lambda module, prefix: module.named_buffers(prefix))
    return ((name, buffer) for name, buffer in found if id(buffer) not in aside)


def _named(modules: Modules, of: _Named[T]) -> Iterator[tuple[str, T]]:
    stages = modules_of(modules)
    if isinstance(modules, Mapping):
        prefixed = any(not named_stacks(module) for module in stages.values())
    else:
        first: dict[str, T] = {}
        every = (found for module in stages.values() for found in of(module, ""))
        prefixed = any(first.setdefault(name, tensor) is not tensor for name, tensor in every)
    seen: set[int] = set()
    for number, module in stages.items():
        for name, tensor in of(module, f"stages.{number}" if prefixed else ""):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def named_stacks(modules: Modules) -> dict[str, int]:
    """Global name of a list of equal layers -> how many of them the whole model has.

    A module says so itself: `stacks = {"decoder.layers": 24}`, of names below it.
    """
    found: dict[str, int] = {}
    for module in modules_of(modules).values():
        for prefix, part in module.named_modules():
            for name, layers in getattr(part, "stacks", {}).items():
                found[f"{prefix}.{name}" if prefix else name] = layers
    return found
