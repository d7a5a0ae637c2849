"""What a program has put into the modules of a stage: hooks, forwards, functions, and what these refer to."""

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from core.parallel_state.by_hand.functions import is_foreign
from core.pipeline.run.checks.kept_by_hooks import reached_from

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def parts_of(stages: Mapping[int, nn.Module]) -> dict[str, nn.Module]:
    """All modules of this rank's stages by name, with the stage where there are several."""
    parts: dict[str, nn.Module] = {}
    for index, stage in stages.items():
        prefix = f"stage {index}" if len(stages) > 1 else ""
        parts |= dict(stage.named_modules(prefix=prefix))
    return parts


def layer_of(name: str) -> str:
    """`decoder.layers.0.mlp` -> `decoder.layers.0`; "" outside of layers."""
    pieces = name.split(".")
    places = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[: places[0] + 1]) if places else ""


def foreign_hooks(part: nn.Module) -> list[Any]:
    """A program's, of all kinds."""
    found = [hook for name in HOOKS for hook in (getattr(part, name, None) or {}).values()]
    return [hook for hook in found if is_foreign(hook)]


def code_of(hook: Any) -> Any:
    """The same for all hooks that one line of a program makes."""
    return getattr(getattr(hook, "__func__", hook), "__code__", type(hook))


def functions_of(part: nn.Module) -> list[Any]:
    """A program's: a class's forward, functions that a module was given (its forward is one), hooks."""
    given = [
        getattr(x, "__func__", x)
        for x in (getattr(type(part), "forward", None), *vars(part).values())
    ]
    functions = [f for f in given if isinstance(f, FunctionType) and is_foreign(f)]
    return functions + [getattr(hook, "__func__", hook) for hook in foreign_hooks(part)]


def public(module: nn.Module) -> list[tuple[str, Any]]:
    """Its attributes, but for what torch's modules are made of."""
    return [(k, v) for k, v in vars(module).items() if k[0] != "_" and k != "training"]


class Attributes:
    """What modules keep that they had not from the beginning, or all of a class of the program's."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        self._known = {id(part): {*vars(part)} for part in parts.values()}

    def of(self, module: nn.Module) -> list[tuple[str, Any]]:
        """By name."""
        return public(module) if is_foreign(type(module)) else self.later(module)

    def later(self, module: nn.Module) -> list[tuple[str, Any]]:
        """What it had not from the beginning, of any class."""
        known = self._known.get(id(module), ())
        return [(name, value) for name, value in public(module) if name not in known]

    def named_in(self, part: nn.Module) -> Iterator[tuple[str, Any]]:
        """What a part's functions refer to, and what it, and modules that they refer to, keep."""
        yield from self.of(part)
        for function in functions_of(part):
            for name, value in reached_from(function):
                if isinstance(value, nn.Module):
                    yield from ((f"{name}.{k}", x) for k, x in self.of(value))
                elif name != "__class__":
                    yield name, value
