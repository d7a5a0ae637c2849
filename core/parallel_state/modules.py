"""One module, or the several stages of a pipeline that live on this rank, taken alike."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import Parameter

from core.parallel_state.spread import keep_layouts

# a mapping names the stages
Modules = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
T = TypeVar("T", bound=Tensor)
_NamedTensors = Callable[[nn.Module, str], Iterator[tuple[str, T]]]
# what torch.compile(module) and torch's checkpoint_wrapper put into the names below them
_WRAPPERS = re.compile(r"(?<![^./])(?:_orig_mod|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Stack:
    """A list of layers of the whole model, which lies as one array per parameter in a checkpoint.

    layers: how many there are. kinds: name of a part that is not the same in all layers (`mlp`) -> its kind in each;
    parts of another kind have parameters of other names.
    """

    layers: int
    kinds: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: "int | Stack") -> "Stack":
        """A number of layers of one kind as a `Stack`."""
        if isinstance(layers, Stack):
            return layers
        return cls(layers)

    def having(self, name: str, layer: int) -> tuple[int, ...]:
        """The numbers of the layers that have parameter `name` (`mlp.linear_fc1.weight`) of layer `layer`."""
        for part, kinds in self.kinds.items():
            if name.startswith(f"{part}."):
                return tuple(number for number, kind in enumerate(kinds) if kind == kinds[layer])
        return tuple(range(self.layers))


def modules_of(modules: Modules) -> dict[int, nn.Module]:
    """stage (or position) -> module, ascending."""
    if isinstance(modules, nn.Module):
        return {0: modules}
    if isinstance(modules, Mapping):
        return dict(sorted(modules.items()))
    return dict(enumerate(modules))


def without_wrappers(name: str) -> str:
    """`layers.0._orig_mod.weight` -> `layers.0.weight`, as the layer has it that is not compiled; of keys too."""
    return _WRAPPERS.sub("", name)


def named_parameters(modules: Modules) -> Iterator[tuple[str, Parameter]]:
    """Every parameter once, by its global name, each with the layout that its module knows (`keep_layouts`).

    Names are those of the module that is not wrapped (`without_wrappers`), whenever torch.compile or a
    checkpoint_wrapper came around its layers.
    Stages of our models say that their names are global (`stacks`): layer 7 is `layers.7` on every stage. Names of
    other stages in a mapping start with `stages.N.`, so that a checkpoint can tell them apart on all ranks; those in
    a list do where two different parameters have the same name.
    """
    for module in modules_of(modules).values():
        keep_layouts(module)
    return _named(modules, lambda module, prefix: module.named_parameters(prefix))


def named_buffers(modules: Modules) -> Iterator[tuple[str, Tensor]]:
    """Every buffer that belongs to the modules' state once, named as parameters are."""
    # by identity: torch knows them by name within their own module only
    non_persistent: set[int] = set()
    for module in modules_of(modules).values():
        for submodule in module.modules():
            names = submodule._non_persistent_buffers_set
            non_persistent.update(id(submodule._buffers[name]) for name in names)
    buffers = _named(modules, lambda module, prefix: module.named_buffers(prefix))
    return ((name, buffer) for name, buffer in buffers if id(buffer) not in non_persistent)


def _named(modules: Modules, with_wrappers: _NamedTensors[T]) -> Iterator[tuple[str, T]]:
    def named(module: nn.Module, prefix: str) -> Iterator[tuple[str, T]]:
        pairs = list(with_wrappers(module, prefix))
        taken = {name for name, _ in pairs}
        for name, tensor in pairs:
            plain = without_wrappers(name)
            yield (name if plain in taken else plain), tensor

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


def named_stacks(modules: Modules) -> dict[str, Stack]:
    """Global name of a list of layers -> what the whole model has of them.

    A module says so itself: `stacks = {"decoder.layers": 24}`, of names below it, or a `Stack` for layers of several
    kinds.
    """
    stacks: dict[str, Stack] = {}
    for module in modules_of(modules).values():
        for prefix, submodule in module.named_modules():
            for name, layers in getattr(submodule, "stacks", {}).items():
                full_name = f"{prefix}.{name}" if prefix else name
                stack = _as_deep_as(submodule, name, Stack.of(layers))
                stacks[without_wrappers(full_name)] = stack
    return stacks


def _as_deep_as(module: nn.Module, name: str, stack: Stack) -> Stack:
    """`stack`, or with as many layers as a program made of them: depth up-scaling, pruning.

    Raises ValueError: other stages, or kinds of layers, would have to know of it as well, or a number is missing.
    """
    layers: Any = module
    for part in name.split("."):
        layers = getattr(layers, part, None)
    children = layers.named_children() if isinstance(layers, nn.Module) else ()
    numbers = {int(key) for key, _ in children if key.isdigit()}
    has_all = getattr(layers, "are_all", False)
    if not numbers or (max(numbers) < stack.layers and not has_all):
        return stack
    if len(numbers) == stack.layers and max(numbers) < stack.layers:
        return stack
    if stack.kinds or not has_all or max(numbers) >= len(numbers):
        raise ValueError(
            f"{name} has layers {', '.join(map(str, sorted(numbers)))}, and the model was built with {stack.layers}. "
            "Layers that a program adds or leaves out are numbered from 0 without gaps, all on one stage and of one "
            "kind: layers = torch.nn.ModuleList([...]) numbers them. Or build the model with as many as it has now "
            "and copy the weights: core.tensor_parallel.fill_from_full"
        )
    return Stack(len(numbers))
