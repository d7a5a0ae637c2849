"""Models that were built on the meta device: filled module by module, of which each rank keeps its part."""

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


def stand_up(module: Modules, ps: ParallelState) -> dict[int, str]:
    """Put parameters of the device, without memory, in the place of those on meta. Returns id -> name of them.

    Raises ValueError: buffers on meta whose module cannot make them again.
    """
    lacking = [
        f"{path}.{name}"
        for stage in modules_of(module).values()
        for path, part in stage.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and buffer.is_meta and not hasattr(part, "reset_parameters")
    ]
    if lacking:
        raise ValueError(
            f"{len(lacking)} buffers are on meta and their modules have no reset_parameters(), first {lacking[0]}: "
            "nobody knows their values; build them on the device, or give init=, and reset_parameters() to the module"
        )
    made: dict[int, Parameter] = {}
    for stage in modules_of(module).values():
        for part in stage.modules():
            for name, p in part._parameters.items():
                if p is not None and p.is_meta:
                    if id(p) not in made:
                        empty = torch.zeros((1,) * p.dim(), dtype=p.dtype, device=ps.device).expand(p.shape)
                        made[id(p)] = Parameter(empty, requires_grad=p.requires_grad)
                        made[id(p)].__dict__.update(p.__dict__)
                    part._parameters[name] = made[id(p)]
    ids = {id(p) for p in made.values()}
    return {id(p): name for name, p in named_parameters(module) if id(p) in ids}


@torch.no_grad()
def fill_all(
    module: Modules, ps: ParallelState, unfilled: Mapping[int, str], buffers: Sequence[Buffer], init: Init | None
) -> None:
    """Draw the values of each module in turn, and keep this rank's part. Collective.

    All ranks of a data group draw the same numbers, in the order of the modules, from the first rank's seed: those
    of a model that was built with it on the device. Raises ValueError: a module that has neither init nor
    `reset_parameters`, nor parameters that carry their own initial values.
    """
    seed = all_gather_objects(torch.initial_seed(), ps.group("dp-cp"))[0]
    places = {id(p): (buffer, i) for buffer in buffers for i, p in enumerate(buffer.parameters)}
    done: set[int] = set()
    with torch.random.fork_rng(devices=[] if ps.device.type == "cpu" else [ps.device]):
        torch.manual_seed(seed)
        for stage in modules_of(module).values():
            for part in list(stage.modules()):
                held = {name: p for name, p in part._parameters.items() if p is not None and id(p) in unfilled}
                if held and not all(id(p) in done for p in held.values()):
                    _fill(part, held, unfilled, ps, init, getattr(stage, "seed", seed))
                    for name, p in held.items():
                        drawn, part._parameters[name] = part._parameters[name], p
                        assert drawn is not None
                        if id(p) in places and id(p) not in done:
                            buffer, index = places[id(p)]
                            buffer.put(index, drawn)
                        elif id(p) not in done:
                            p.data = drawn.data
                    done |= {id(p) for p in held.values()}
                elif any(buffer is not None and buffer.is_meta for buffer in part._buffers.values()):
                    remake: Any = part.reset_parameters  # `stand_up` has seen that it is there
                    remake()


def _fill(
    part: nn.Module,
    held: Mapping[str, Parameter],
    names: Mapping[int, str],
    ps: ParallelState,
    init: Init | None,
    seed: int,
) -> None:
    """Real parameters in the module, with values."""
    for name, p in held.items():
        whole = Parameter(torch.empty(p.shape, dtype=p.dtype, device=ps.device), requires_grad=False)
        whole.__dict__.update(p.__dict__)
        part._parameters[name] = whole
    for name, buffer in part._buffers.items():
        if buffer is not None and buffer.is_meta:
            part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=ps.device)
    own = [p for p in held.values() if getattr(p, "initial", None) is not None]
    if init is not None:
        init(part)
    elif len(own) == len(held):
        for name, p in held.items():
            tensor: Tensor = part._parameters[name]  # type: ignore[assignment]
            fill(tensor, names[id(p)], p.initial, seed=seed, at=ps.coordinate, sizes=ps.sizes)  # type: ignore[attr-defined]
    elif callable(reset := getattr(part, "reset_parameters", None)):
        reset()
    else:
        raise ValueError(
            f"{type(part).__name__} holds {len(held)} parameters on meta ({next(iter(held))}, ...) and has no "
            "reset_parameters(); give DataParallel init=, a function that fills one module's own parameters"
        )
