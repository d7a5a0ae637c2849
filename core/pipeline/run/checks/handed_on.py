"""What a layer leaves in an object for layers after it (value residuals, skips): other stages find none of it."""

import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.functions import is_foreign
from core.pipeline.run.checks.collected import Mark, foreign_hooks, mark_of, public
from core.pipeline.run.checks.kept_by_hooks import reached_from


class HandedOn:
    """Warns, once, of an object that several layers of this rank share and that one of them writes in its forward.

    Looks in the calls 1, 2, 4, 8 ... of a pipeline, at layers whose hooks, forward or functions are a program's.
    What a stage's own hook writes, before its layers, is each stage's, and right.
    """

    def __init__(self, stages: Mapping[int, nn.Module], pipeline_ranks: int) -> None:
        self._stages = stages
        self._ranks = pipeline_ranks
        self._calls = 0
        self._has_told = False
        self._found: tuple[str, str] | None = None
        self._parts: dict[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        # what a module has from the beginning is its own, if it is torch's or ours
        self._known = {id(part): {*vars(part)} for part in self._all().values()}

    def before_call(self) -> None:
        """A call begins, of any kind."""
        self._end()
        self._calls += 1
        is_watched = not self._has_told and not self._calls & (self._calls - 1)
        every = self._all() if is_watched else {}
        # hooks would make compiled graphs anew
        if any(map(is_compiled, self._stages.values())):
            return
        self._parts = {n: part for n, part in every.items() if _layer_of(n) and _functions_of(part)}
        if len({*map(_layer_of, self._parts)}) > 1:
            for name, part in self._parts.items():
                self._listen(name, part)

    def after_call(self, *, tells: bool) -> None:
        """tells: of what was found; nothing else was."""
        self._end()
        if tells and self._found is not None and not self._has_told:
            self._has_told = True
            kept, where = self._found
            warnings.warn(
                f"`{kept}`, which layers of this rank share, is written in the forward of {where}: those of each of "
                f"{self._ranks} pipeline ranks share one of their own. What a layer finds there of others, and a "
                "mean or sum of it, is of this rank's layers. Hand tensors on in the stage's output (a tuple or a "
                "mapping); what only the layer that wrote it reads is right",
                stacklevel=5,
            )

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _all(self) -> dict[str, nn.Module]:
        parts: dict[str, nn.Module] = {}
        for index, stage in self._stages.items():
            prefix = f"stage {index}" if len(self._stages) > 1 else ""
            parts |= dict(stage.named_modules(prefix=prefix))
        return parts

    def _listen(self, name: str, part: nn.Module) -> None:
        before: dict[str, Mark] = {}

        def begin(module: nn.Module, args: Any) -> None:
            before.update({kept: _mark_of(value) for kept, value in self._named_in(part)})

        def end(module: nn.Module, args: Any, output: Any) -> None:
            for kept, value in self._named_in(part) if self._found is None else ():
                mark = _mark_of(value)
                if mark and mark != before.get(kept) and self._is_shared(value, name):
                    self._found = kept, name

        # around the program's hooks
        self._handles.append(part.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(part.register_forward_hook(end))

    def _is_shared(self, value: Any, writer: str) -> bool:
        """Whether another layer refers to it."""
        others = [part for n, part in self._parts.items() if _layer_of(n) != _layer_of(writer)]
        return any(each is value for part in others for _, each in self._named_in(part))

    def _named_in(self, part: nn.Module) -> Iterator[tuple[str, Any]]:
        """What a part's functions refer to, and what it, and modules that they refer to, have."""
        yield from self._kept_by(part)
        for function in _functions_of(part):
            for name, value in reached_from(function):
                if isinstance(value, nn.Module):
                    yield from ((f"{name}.{k}", x) for k, x in self._kept_by(value))
                else:
                    yield name, value

    def _kept_by(self, module: nn.Module) -> list[tuple[str, Any]]:
        known = () if is_foreign(type(module)) else self._known.get(id(module), ())
        return [(name, value) for name, value in public(module) if name not in known]


def _layer_of(name: str) -> str:
    """`decoder.layers.0.mlp` -> `decoder.layers.0`; "" outside of layers."""
    pieces = name.split(".")
    places = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    return ".".join(pieces[: places[0] + 1]) if places else ""


def _functions_of(part: nn.Module) -> list[Any]:
    """A program's: a class's forward, one that was put in its place, functions that it was given, hooks."""
    forwards = [type(part).forward] if is_foreign(type(part)) else []
    given = [getattr(x, "__func__", x) for x in vars(part).values()]
    hooks = [getattr(hook, "__func__", hook) for hook in foreign_hooks(part)]
    functions = [*forwards, *(f for f in given if isinstance(f, FunctionType)), *hooks]
    return [f for f in functions if is_foreign(f)]


def _mark_of(value: Any) -> Mark:
    """Of a class, as a name for shared values: what it has."""
    if not isinstance(value, type):
        return mark_of(value)
    is_namespace = is_foreign(value) and not issubclass(value, nn.Module)
    return mark_of({k: x for k, x in vars(value).items() if k[0] != "_"}) if is_namespace else ()
