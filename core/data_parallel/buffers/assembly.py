"""What a `DataParallel` makes of a model: buckets from their table, a slot per parameter, units per stage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import Parameter

from core.data_parallel.buffers.buffers import Buffer
from core.data_parallel.buffers.gradient import ParameterSlot
from core.data_parallel.buffers.units import StageUnits, Unit, make_units, needs_units
from core.data_parallel.weights.start import same_on_all
from core.data_parallel.weights.table import Members, entries_of
from core.parallel_state.flat import bucket_table
from core.parallel_state.modules import Modules
from core.parallel_state.state import ParallelState


def make_buffers(
    module: Modules,
    names: Mapping[Parameter, str],
    stages: Mapping[int, Members],
    ps: ParallelState,
    *,
    zero_stage: int,
    bucket_size: int | None,
    grad_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> tuple[Buffer, ...]:
    """One buffer per bucket; parameters become views of it. Collective, and raises ValueError: see `same_on_all`."""
    if bucket_size is None:
        # elements: launches cost more on an accelerator, memory less
        bucket_size = 2**20 if ps.device.type == "cpu" else 2**23
    divided_over = {"dp-cp": ps.size("shard"), "edp": ps.size("edp")}
    table = bucket_table(entries_of(module, stages), divided_over, bucket_size)
    check_device(names, ps.device)
    # first of all: ranks that cut other buckets would wait for each other in the first sum
    same_on_all(module, table, ps)

    parameters = {name: parameter for parameter, name in names.items()}
    # one list for all: the first loan of any bucket warns for the others too
    loan_warnings: list[str] = []
    buffers = []
    for number, bucket in enumerate(table):
        buffer = Buffer(
            number,
            bucket,
            parameters,
            ps,
            zero_stage=zero_stage,
            grad_dtype=grad_dtype,
            reduce_dtype=reduce_dtype,
        )
        buffer.loan_warnings = loan_warnings
        buffers.append(buffer)
    return tuple(buffers)


def check_device(names: Mapping[Parameter, str], device: torch.device) -> None:
    """Raise ValueError for weights on an accelerator that the parallel state is not on; others move to `device`."""
    for parameter, name in names.items():
        if parameter.device.type not in (device.type, "cpu", "meta"):
            raise ValueError(
                f"{name} is on {parameter.device}, the parallel state on {device}, which gradients and collectives "
                f"need: join with a backend of {parameter.device.type} (init_process_group('nccl'), "
                f"launch()), or build the state with device={parameter.device.type!r}"
            )


def overlap_pays(
    buffers: Iterable[Buffer], device: torch.device, zero_stage: int, backward_passes: int | None
) -> bool:
    """The default of `overlap`: where a backend needs no cores of ours, or memory is to be bounded."""
    runs_beside_us = any(
        buffer.ranks is not None and device.type not in buffer.ranks.gloo for buffer in buffers
    )
    return runs_beside_us or zero_stage >= 2 or backward_passes is not None


def make_slots(buffers: Iterable[Buffer], names: Mapping[Parameter, str]) -> list[ParameterSlot]:
    """One per parameter, in the order of the buckets."""
    slots = []
    for buffer in buffers:
        for index, parameter in enumerate(buffer.parameters):
            slots.append(ParameterSlot(parameter, names[parameter], buffer, index))
    for slot in slots:
        slot.num_slots = len(slots)
    return slots


def buffers_of_stages(
    stages: Iterable[Members], buffers: Sequence[Buffer]
) -> dict[nn.Module, list[Buffer]]:
    """Pipeline stage -> the buckets that hold its parameters; that of a tied table stands at both ends."""
    buffer_of = {}
    for buffer in buffers:
        for parameter in buffer.parameters:
            buffer_of[parameter] = buffer
    holders: dict[nn.Module, list[Buffer]] = {}
    for members in stages:
        in_stage = {buffer_of[parameter] for parameter in members.parameters}
        holders[members.module] = [buffer for buffer in buffers if buffer in in_stage]
    return holders


def units_of_stages(
    stages: Iterable[Members],
    holders: Mapping[nn.Module, Sequence[Buffer]],
    slots: Sequence[ParameterSlot],
    *,
    zero_stage: int,
    overlap: bool,
    backward_begins: Callable[[nn.Module], bool],
) -> dict[nn.Module, StageUnits]:
    """Pipeline stage -> what of it is gathered and freed together; without those that need no units.

    backward_begins: is called with a stage whose backward begins; whether it is a plain loop's.
    """
    units_of: dict[nn.Module, StageUnits] = {}
    for members in stages:
        stage = members.module
        if needs_units(holders[stage], zero_stage, overlap):
            units_of[stage] = make_units(
                members, holders[stage], zero_stage, partial(backward_begins, stage)
            )

    # each slot knows the layer with which its parameter is gathered and freed
    unit_of: dict[Parameter, Unit] = {}
    for units in units_of.values():
        for unit in units.layers:
            unit_of.update(dict.fromkeys(unit.parameters, unit))
    for slot in slots:
        slot.unit = unit_of.get(slot.parameter)
    return units_of
