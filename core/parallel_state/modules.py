"""One module, or the several stages of a pipeline that live on this rank, taken alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.spread import keep_layouts

Modules = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]  # a mapping names the stages
T = TypeVar("T", bound=Tensor)
_NamedTensors = Callable[[nn.Module, str], Iterator[tuple[str, T]]]


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
    non_persistent: set[int] = set()
    for module in modules_of(modules).values():
        for submodule in module.modules():
            names = submodule._non_persistent_buffers_set
            non_persistent.update(id(submodule._buffers[name]) for name in names)
    buffers = _named(modules, lambda module, prefix: module.named_buffers(prefix))
    return ((name, buffer) for name, buffer in buffers if id(buffer) not in non_persistent)


def _named(modules: Modules, named: _NamedTensors[T]) -> Iterator[tuple[str, T]]:
    stages = modules_of(modules)
    if isinstance(modules, Mapping):
        prefixed = any(not named_stacks(module) for module in stages.values())
    else:
        # prefixes only where two different tensors have the same name
        tensor_of: dict[str, T] = {}
        prefixed = False
        for module in stages.values():
            for name, tensor in named(module, ""):
                prefixed = prefixed or tensor_of.setdefault(name, tensor) is not tensor
    seen: set[int] = set()
    for number, module in stages.items():
        for name, tensor in named(module, f"stages.{number}" if prefixed else ""):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def named_stacks(modules: Modules) -> dict[str, int]:
    """Global name of a list of equal layers -> how many of them the whole model has.

    A module says so itself: `stacks = {"decoder.layers": 24}`, of names below it.
    """
    stacks: dict[str, int] = {}
    for module in modules_of(modules).values():
        for prefix, submodule in module.named_modules():
            for name, layers in getattr(submodule, "stacks", {}).items():
                stacks[f"{prefix}.{name}" if prefix else name] = layers
    return stacks
