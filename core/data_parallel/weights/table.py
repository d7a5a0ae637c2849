"""From modules to the entries of the bucket table: which parameter is gathered with what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn import Parameter

from core.autograd.regions import outermost
from core.data_parallel.weights.weights import without_memory
from core.parallel_state.flat import Entry, is_vector
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import Modules, modules_of, named_parameters

Units = str | Sequence[str | type[nn.Module]]


@dataclass(eq=False)
class Members:
    """One stage: its module, the modules that are gathered by themselves, and who holds which parameter.

    names[p]: the unit of a parameter that only one unit uses; parameters used elsewhere too are not in it.
    """

    module: nn.Module
    units: dict[str, nn.Module]
    names: dict[Parameter, str] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Parameter]:
        """The trainable ones, each once."""
        return [p for p in self.module.parameters() if p.requires_grad]


def stages_of(modules: Modules, units: Units) -> dict[int, Members]:
    """stage -> its units. "layer": the elements of ModuleLists and ModuleDicts, and blocks in a Sequential.

    Raises ValueError: a name or class that matches no module of any stage.
    """
    found: dict[int, Members] = {}
    problems = []
    for number, module in modules_of(modules).items():
        try:
            chosen = outermost(module, units if units == "layer" or not isinstance(units, str) else [units])
        except ValueError as error:
            chosen = {}
            problems.append(error)
        if units == "layer":
            chosen |= _blocks(module, chosen)
        found[number] = Members(module, chosen)
    if units != "layer" and len(problems) == len(found):  # a stage of its own may well lack some
        raise ValueError(f"shard_units: {problems[0]}")
    uses: dict[Parameter, set[tuple[int, str]]] = {}
    for number, stage in found.items():
        for path, module in stage.module.named_modules(remove_duplicate=False):
            inside = next((unit for unit in stage.units if f"{path}.".startswith(f"{unit}.")), "")
            for p in module.parameters(recurse=False):
                uses.setdefault(p, set()).add((number, inside))
    for stage in found.values():
        for p in stage.parameters:
            ((_, unit), *others) = uses[p]
            if unit and not others:
                stage.names[p] = unit
    return found


def _blocks(module: nn.Module, chosen: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Layers that stand in an nn.Sequential (torchvision, timm): elements with modules of their own, the innermost
    such ones, where no chosen layer is inside or around."""
    found: dict[str, nn.Module] = {}
    for path, parent in module.named_modules():
        if not isinstance(parent, nn.Sequential) or any(f"{path}.".startswith(f"{name}.") for name in chosen):
            continue
        for name, child in parent.named_children():
            whole = f"{path}.{name}" if path else name
            inner = [m for m in child.modules() if isinstance(m, nn.Sequential)]
            deeper = any(next(element.children(), None) is not None for m in inner for element in m)
            around = any(other.startswith(f"{whole}.") for other in chosen)
            inside = any(whole.startswith(f"{other}.") for other in found)
            if next(child.children(), None) is not None and not (deeper or around or inside):
                found[whole] = child
    return found


def entries_of(modules: Modules, stages: Mapping[int, Members]) -> list[Entry]:
    """The trainable parameters, in the order of execution. Raises ValueError: parameters that share memory."""
    names = {p: name for name, p in named_parameters(modules) if p.requires_grad}
    _refuse_overlap(names)
    made: dict[str, Entry] = {}
    for number, stage in stages.items():
        for p in stage.parameters:
            name, layout = names[p], layout_of(p)
            made.setdefault(
                name,
                Entry(
                    name,
                    p.numel(),
                    stage.names.get(p, ""),
                    number,
                    layout.gradient_groups[0],
                    str(p.dtype).removeprefix("torch."),
                    is_vector(name, layout.shape),
                    "embedding" in layout.partial,
                ),
            )
    return list(made.values())


def _refuse_overlap(names: Mapping[Parameter, str]) -> None:
    """Two parameters in one memory would be two after they were moved."""
    spans: list[tuple[int, int, Any]] = [
        (p.data_ptr(), p.data_ptr() + p.numel() * p.itemsize, name)
        for p, name in names.items()
        if p.data_ptr() and not without_memory(p)
    ]
    spans.sort(key=lambda span: span[:2])
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"{one} and {other} are 2 parameters in 1 memory: they would be updated twice; make them one "
                "nn.Parameter used in both places"
            )
