"""What layers of a stage share by references: an object that one leaves something in for others (value residuals,
skips), a parameter that none of them has. Layers of other stages share another."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from core.parallel_state.by_hand.as_written import is_compiled
from core.parallel_state.by_hand.functions import is_foreign, program_level
from core.parallel_state.layout import layout_of
from core.pipeline.run.checks.collected import Mark, mark_of
from core.pipeline.run.checks.host_draws import generator_of, state_of
from core.pipeline.run.checks.kept_by_hooks import held_in, reached_from
from core.pipeline.run.checks.program_parts import Attributes, functions_of, layer_of, parts_of

_WRITTEN_REMEDY = (
    "What a layer finds there of others, and a mean or sum of it, is of this rank's layers. Hand tensors on in the "
    "stage's output (a tuple or a mapping); what only the layer that wrote it reads is right"
)
_DRAWN_REMEDY = (
    "Seeded alike they draw the same for other layers, and in the order of the schedule. Give each layer a generator "
    "that is seeded by its number in the whole model, or draw with torch (torch.rand(())), whose generators are "
    "seeded for each microbatch and stage"
)


class SharedByLayers:
    """Warns, once of each, of an object that layers of this rank share and one writes in its forward, and of a
    parameter that they share.

    Looks in the calls 1, 2, 4, 8 ... of a pipeline, at layers whose hooks, forward or functions are a program's.
    What a stage's own hook writes, before its layers, is each stage's, and right.
    """

    def __init__(self, stages: Mapping[int, nn.Module], pipeline_ranks: int) -> None:
        self._stages = stages
        self._ranks = pipeline_ranks
        self._calls = 0
        self._found: tuple[str, str] | None = None
        self._has_told = self._has_told_of_parameters = False
        # of what it was told
        self.told_name = ""
        # what shared numbers that count layers were when a layer ended
        self._counts: dict[str, int] = {}
        self._parts: dict[str, nn.Module] = {}
        # whether what was found is a generator
        self._draws = False
        self._handles: list[RemovableHandle] = []
        self._attributes = Attributes(parts_of(stages))

    def before_call(self) -> None:
        """A call begins, of any kind."""
        self._end()
        self._calls += 1
        self._counts = {}
        # hooks would make compiled graphs anew
        if self._calls & (self._calls - 1) or any(map(is_compiled, self._stages.values())):
            return
        every = parts_of(self._stages)
        self._parts = {n: part for n, part in every.items() if layer_of(n) and functions_of(part)}
        if len({*map(layer_of, self._parts)}) < 2:
            return
        if not self._has_told_of_parameters:
            self._look_for_parameters(every)
        if not self._has_told:
            for name, part in self._parts.items():
                self._listen(name, part)

    def after_call(self) -> None:
        """Tell of an object with numbers; of activations it was told at once, they may end the call."""
        self._end()
        if self._found is not None and not self._has_told:
            self._tell()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _tell(self) -> None:
        assert self._found is not None
        self._has_told = True
        kept, where = self._found
        self.told_name = kept
        says, remedy = ("draws", _DRAWN_REMEDY) if self._draws else ("is written", _WRITTEN_REMEDY)
        warnings.warn(
            f"`{kept}`, which layers of this rank share, {says} in the forward of {where}: those of each of "
            f"{self._ranks} pipeline ranks share one of their own. {remedy}",
            stacklevel=program_level(),
        )

    def _listen(self, name: str, part: nn.Module) -> None:
        before: dict[str, Mark] = {}
        counts: dict[str, int] = {}

        def begin(module: nn.Module, args: Any) -> None:
            for kept, value in self._attributes.named_in(part):
                before[kept] = _mark_of(value)
                counts[kept] = _count_in(value)
                # it begins again in each forward: not calls are counted, but layers
                if self._found is None and 0 <= counts[kept] < self._counts.get(kept, 0):
                    self._found = kept, name

        def end(module: nn.Module, args: Any, output: Any) -> None:
            for kept, value in self._attributes.named_in(part) if self._found is None else ():
                mark, count = _mark_of(value), _count_in(value)
                if count > counts.get(kept, count) and self._is_shared(value, name):
                    self._counts[kept] = count
                if mark and mark != before.get(kept) and self._is_shared(value, name):
                    self._found = kept, name
                    self._draws = generator_of(value) is not None
                    if any(map(_is_activation, held_in(_contents(value)))):
                        self._tell()

        # around the program's hooks
        self._handles.append(part.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(part.register_forward_hook(end))

    def _is_shared(self, value: Any, writer: str) -> bool:
        """Whether another layer refers to it."""
        others = [part for n, part in self._parts.items() if layer_of(n) != layer_of(writer)]
        # a method of a generator is another object at each look
        value = generator_of(value) or value
        found = (each for part in others for _, each in self._attributes.named_in(part))
        return any(each is value or generator_of(each) is value for each in found)

    def _look_for_parameters(self, every: Mapping[str, nn.Module]) -> None:
        """Warn of a trained one that functions of several layers refer to and no layer has."""
        own_ids = {
            id(p) for n, part in every.items() if layer_of(n) for p in part.parameters(False)
        }
        layers: dict[int, set[str]] = defaultdict(set)
        for name, part in self._parts.items():
            for kept, parameter in _parameters_in(part, own_ids):
                layers[id(parameter)].add(layer_of(name))
                if len(layers[id(parameter)]) > 1:
                    self._has_told_of_parameters = True
                    warnings.warn(
                        f"`{kept}` has a parameter that layers of this rank use and none of them has: each of "
                        f"{self._ranks} pipeline ranks trains a copy by its own layers' part of the gradient. Give "
                        "each layer one of its own, or keep it on the first stage and hand it on in the stages' "
                        "output",
                        stacklevel=program_level(),
                    )
                    return


def _parameters_in(part: nn.Module, own_ids: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trained ones that the part's functions refer to, but for those of layers, and of models with layers."""
    for function in functions_of(part):
        for name, value in reached_from(function):
            for held in held_in(value):
                found = list(held.parameters()) if isinstance(held, nn.Module) else [held]
                trained = [p for p in found if isinstance(p, nn.Parameter) and p.requires_grad]
                is_tied = any("embedding" in layout_of(p).partial for p in trained)
                if not is_tied and own_ids.isdisjoint(map(id, trained)):
                    yield from ((name, p) for p in trained)


def _count_in(value: Any) -> int:
    """The sum of the integers in it; -1: it has none."""
    found = [x for x in held_in(_contents(value)) if type(x) is int]
    return sum(found) if found else -1


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.requires_grad


def _contents(value: Any) -> Any:
    """Of a class, as a name for shared values, what it has."""
    if isinstance(value, type):
        return {k: x for k, x in vars(value).items() if k[0] != "_"}
    return value


def _mark_of(value: Any) -> Mark:
    if (generator := generator_of(value)) is not None:
        return (state_of(generator),)
    if not isinstance(value, type):
        return mark_of(value)
    return mark_of(_contents(value)) if is_foreign(value) else ()
