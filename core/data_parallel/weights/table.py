"""From modules to the entries of the bucket table: which parameters are gathered together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn import Parameter

from core.autograd.recomputation.policy import outermost
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
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


def own_stage(stage: nn.Module, stages: Sequence[nn.Module]) -> nn.Module:
    """Of `stages` the one that is `stage`, or lies up to two wrappers inside of it; the only one, if it is alone.

    Raises ValueError: none of several.
    """
    if stage in stages:
        return stage
    inside = {own for child in stage.children() for own in (child, *child.children())}
    wrapped = [own for own in stages if own in inside] or list(stages)
    if len(wrapped) != 1:
        raise ValueError(
            f"DataParallel holds {len(stages)} stages, and {type(stage).__name__} is none of them; give it "
            "and the executor the same modules"
        )
    return wrapped[0]


def stages_of(modules: Modules, units: Units) -> dict[int, Members]:
    """stage -> its units. "layer": the elements of ModuleLists and ModuleDicts, and blocks in a Sequential.

    Raises ValueError: a name or class that matches no module of any stage.
    """
    stages: dict[int, Members] = {}
    problems = []
    for number, module in modules_of(modules).items():
        try:
            chosen = outermost(
                module, units if units == "layer" or not isinstance(units, str) else [units]
            )
        except ValueError as error:
            chosen = {}
            problems.append(error)
        if units == "layer":
            chosen |= _sequential_blocks(module, chosen)
        stages[number] = Members(module, chosen)
    # a single stage may lack some of the names
    if units != "layer" and len(problems) == len(stages):
        raise ValueError(f"shard_units: {problems[0]}")
    # (stage, unit) of every use, a shared module at each of its places
    uses: dict[Parameter, set[tuple[int, str]]] = {}
    for number, stage in stages.items():
        for path, module in stage.module.named_modules(remove_duplicate=False):
            # "": of no unit, the stage itself
            is_inside = next(
                (unit for unit in stage.units if f"{path}.".startswith(f"{unit}.")), ""
            )
            for parameter in module.parameters(recurse=False):
                uses.setdefault(parameter, set()).add((number, is_inside))
    for stage in stages.values():
        for parameter in stage.parameters:
            ((_, unit), *others) = uses[parameter]
            if unit and not others:
                stage.names[parameter] = unit
    return stages


def _sequential_blocks(module: nn.Module, chosen: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Layers that stand in an nn.Sequential (torchvision, timm): elements with modules of their own, the innermost
    such ones, where no chosen layer is inside or around."""
    blocks: dict[str, nn.Module] = {}
    for path, parent in module.named_modules():
        if not isinstance(parent, nn.Sequential) or any(
            f"{path}.".startswith(f"{name}.") for name in chosen
        ):
            continue
        for name, child in parent.named_children():
            full_name = f"{path}.{name}" if path else name
            if next(child.children(), None) is None or _has_inner_blocks(child):
                continue
            contains_chosen = any(chosen_name.startswith(f"{full_name}.") for chosen_name in chosen)
            is_inside = any(full_name.startswith(f"{block_name}.") for block_name in blocks)
            if not (contains_chosen or is_inside):
                blocks[full_name] = child
    return blocks


def _has_inner_blocks(module: nn.Module) -> bool:
    """Whether an nn.Sequential inside of it has elements with modules of their own."""
    for inner in module.modules():
        if not isinstance(inner, nn.Sequential):
            continue
        if any(next(element.children(), None) is not None for element in inner):
            return True
    return False


def entries_of(modules: Modules, stages: Mapping[int, Members]) -> list[Entry]:
    """The trainable parameters, in the order of execution. Raises ValueError: parameters that share memory."""
    names = {
        parameter: name for name, parameter in named_parameters(modules) if parameter.requires_grad
    }
    _refuse_overlap(names)
    entries: dict[str, Entry] = {}
    for number, stage in stages.items():
        for parameter in stage.parameters:
            name = names[parameter]
            layout = layout_of(parameter)
            entries.setdefault(
                name,
                Entry(
                    name,
                    parameter.numel(),
                    stage.names.get(parameter, ""),
                    number,
                    layout.gradient_groups[0],
                    str(parameter.dtype).removeprefix("torch."),
                    is_vector(name, layout.shape),
                    "embedding" in layout.partial,
                ),
            )
    return list(entries.values())


def _refuse_overlap(names: Mapping[Parameter, str]) -> None:
    """Two parameters in one memory would be moved into two places of the buckets."""
    spans: list[tuple[int, int, Any]] = [
        (parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.itemsize, name)
        for parameter, name in names.items()
        if parameter.data_ptr() and not without_memory(parameter)
    ]
    spans.sort(key=lambda span: span[:2])
    for (_, end, first_name), (start, _, second_name) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"{first_name} and {second_name} are 2 parameters in 1 memory: they would be updated twice; make "
                "them one nn.Parameter used in both places"
            )
