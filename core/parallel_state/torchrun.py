"""From torchrun's environment, or a single process, to a joined world and a device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.parallel_state.collectives import groups as pg
from core.parallel_state.state import check_device, default_device


@contextmanager
def launch(
    device: str | None = None, *, backend: str | None = None, timeout_s: float = 600.0
) -> Iterator[torch.device]:
    """Join torchrun's world (WORLD_SIZE and RANK set) or run as one process; leave it at the end, error or not.

    Yields the device of this process: `device` ("cpu", an accelerator type), else the accelerator of
    LOCAL_RANK, else the CPU. The backend is gloo for CPU tensors and the accelerator's own beside it.
    Raises ValueError: an accelerator that this machine lacks, more local ranks than devices.
    """
    kind = device or default_device().type
    check_device(kind.partition(":")[0])
    place = torch.device(kind)
    if kind != "cpu":
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.accelerator.device_count()
        if local >= count:
            raise ValueError(f"local rank {local} needs {local + 1} devices, this machine has {count}")
        place = torch.device(place.type, local)
        torch.accelerator.set_device_index(local)
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if distributed:
        pg.init_world(backend or ("gloo" if kind == "cpu" else None), timeout_s)
    try:
        yield place
    finally:
        if distributed:
            pg.destroy_world()
