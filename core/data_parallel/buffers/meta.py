"""Models that were built on the meta device: filled module by module, so that a rank never holds more than its
shards and one module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from core.data_parallel.buffers.buffers import Buffer
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.initial import fill
from core.parallel_state.modules import Modules, modules_of, named_parameters
from core.parallel_state.state import ParallelState

Init = Callable[[nn.Module], None]


def allocate_from_meta(module: Modules, ps: ParallelState) -> dict[int, str]:
    """Replace parameters on meta by parameters of the device without memory. Returns id -> name of them.

    Raises ValueError: buffers on meta whose module cannot make them again.
    """
    lacking = []
    for stage in modules_of(module).values():
        for path, submodule in stage.named_modules():
            if hasattr(submodule, "reset_parameters"):
                continue
            for name, buffer in submodule._buffers.items():
                if buffer is not None and buffer.is_meta:
                    lacking.append(f"{path}.{name}")
    if lacking:
        raise ValueError(
            f"{len(lacking)} buffers are on meta and their modules have no reset_parameters(), first {lacking[0]}: "
            "nobody knows their values; build them on the device, or give init=, and reset_parameters() to the module"
        )
    replacements: dict[int, Parameter] = {}
    for stage in modules_of(module).values():
        for submodule in stage.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is not None and parameter.is_meta:
                    # tied weights are one parameter, also afterwards
                    if id(parameter) not in replacements:
                        replacements[id(parameter)] = _without_memory_like(parameter, ps.device)
                    submodule._parameters[name] = replacements[id(parameter)]
    ids = {id(parameter) for parameter in replacements.values()}
    return {
        id(parameter): name for name, parameter in named_parameters(module) if id(parameter) in ids
    }


def _without_memory_like(parameter: Parameter, device: torch.device) -> Parameter:
    """The same shape, dtype and attributes on `device`, one element expanded to the shape."""
    element = torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=device)
    replacement = Parameter(element.expand(parameter.shape), requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    return replacement


@torch.no_grad()
def fill_all(
    module: Modules,
    ps: ParallelState,
    name_of_unfilled: Mapping[int, str],
    buffers: Sequence[Buffer],
    init: Init | None,
) -> None:
    """Draw the values of each module in turn, and keep this rank's shard. Collective.

    All ranks of a data group draw the same numbers, in the order of the modules, from the first rank's seed: those
    of a model that was built with it on the device. Raises ValueError: a module that has neither init nor
    `reset_parameters`, nor parameters that carry their own initial values.
    """
    seed = all_gather_objects(torch.initial_seed(), ps.group("dp-cp"))[0]
    # where each parameter lies: its bucket, and its number there
    buffer_of = {}
    for buffer in buffers:
        for number, parameter in enumerate(buffer.parameters):
            buffer_of[id(parameter)] = (buffer, number)
    filled: set[int] = set()
    with torch.random.fork_rng(devices=[] if ps.device.type == "cpu" else [ps.device]):
        torch.manual_seed(seed)
        for stage in modules_of(module).values():
            for submodule in list(stage.modules()):
                present = {name: p for name, p in submodule._parameters.items() if p is not None}
                own_parameters = {
                    name: p for name, p in present.items() if id(p) in name_of_unfilled
                }
                ids = {id(parameter) for parameter in own_parameters.values()}
                if ids - filled:
                    how = {
                        "seed": getattr(stage, "seed", seed),
                        "draw_on_cpu": getattr(stage, "draws_on_cpu", True),
                    }
                    _fill_module(submodule, own_parameters, name_of_unfilled, ps, init, how)
                    for name, parameter in own_parameters.items():
                        # the full tensor goes as soon as this rank has its elements of it
                        full = submodule._parameters[name]
                        submodule._parameters[name] = parameter
                        assert full is not None
                        # tied weights: the first values count
                        if id(parameter) in filled:
                            continue
                        if id(parameter) in buffer_of:
                            buffer, index = buffer_of[id(parameter)]
                            buffer.store(index, full)
                        else:  # frozen: every rank has it in full
                            parameter.data = full.data
                    filled |= ids
                elif any(
                    buffer is not None and buffer.is_meta for buffer in submodule._buffers.values()
                ):
                    # `allocate_from_meta` has checked that it is there
                    remake: Any = submodule.reset_parameters
                    remake()


def _fill_module(
    submodule: nn.Module,
    own_parameters: Mapping[str, Parameter],
    name_of: Mapping[int, str],
    ps: ParallelState,
    init: Init | None,
    how: Mapping[str, Any],
) -> None:
    """Put real parameters into the module, with values; how: seed and draw_on_cpu of `fill`."""
    for name, parameter in own_parameters.items():
        full = Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=ps.device),
            requires_grad=False,
        )
        full.__dict__.update(parameter.__dict__)
        submodule._parameters[name] = full
    on_meta = {name: b for name, b in submodule._buffers.items() if b is not None and b.is_meta}
    for name, buffer in on_meta.items():
        submodule._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=ps.device)
    with_initial = [
        parameter
        for parameter in own_parameters.values()
        if getattr(parameter, "initial", None) is not None
    ]
    says_own_values = len(with_initial) == len(own_parameters)
    # what gives parameters their first values then does not give them to buffers
    if on_meta and (init is not None or says_own_values):
        remake: Any = submodule.reset_parameters
        remake()
    if init is not None:
        init(submodule)
    elif says_own_values:
        for name, parameter in own_parameters.items():
            tensor: Tensor = submodule._parameters[name]  # type: ignore[assignment]
            initial = parameter.initial  # type: ignore[attr-defined]
            fill(
                tensor,
                name_of[id(parameter)],
                initial,
                coordinate=ps.coordinate,
                sizes=ps.sizes,
                **how,
            )
    elif callable(reset := getattr(submodule, "reset_parameters", None)):
        reset()
    else:
        raise ValueError(
            f"{type(submodule).__name__} holds {len(own_parameters)} parameters on meta "
            f"({next(iter(own_parameters))}, ...) and has no reset_parameters(); "
            "give DataParallel init=, a function that fills one module's own parameters"
        )
