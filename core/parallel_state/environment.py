"""From torchrun's environment, or a single process, to a joined world and a device."""

import atexit
import os
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from core.parallel_state.collectives import groups as pg

# times a float32 product: a bfloat16 one takes no longer where there are instructions for it
EMULATED = 2.0


def local_device(kind: str | None = None, *, shared: bool = False) -> torch.device:
    """This process's device: an accelerator (cuda, npu, xpu, ...) if there is one, else the CPU; or one of `kind`.

    The accelerator's index is the one that the process has chosen, or else torchrun's LOCAL_RANK, which is
    then made the current one. shared: more processes than devices take them in turn (gloo's staged path).
    Raises ValueError: an accelerator that this machine lacks, a local rank beyond its devices.
    """
    accelerator = None
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
    available = accelerator.type if accelerator is not None else "none"
    if kind is not None and kind.partition(":")[0] not in ("cpu", "meta", available):
        raise ValueError(
            f"device {kind!r} asked for, but this machine's accelerator is: {available}; use device='cpu'"
        )
    if kind is not None:
        requested = torch.device(kind)
    else:
        requested = accelerator or torch.device("cpu")
    if requested.type in ("cpu", "meta"):
        return torch.device(requested.type)
    index = requested.index
    if index is None:
        index = torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    # nobody chose, and there is something to choose
    if requested.index is None and index == 0 and count > 1:
        # as torchrun numbers the processes of a host
        index = int(os.environ.get("LOCAL_RANK", 0))
    if shared and requested.index is None:
        index = int(os.environ.get("LOCAL_RANK", 0)) % count
    if index >= count:
        raise ValueError(
            f"this process wants device {index} of type {requested.type}, this machine has {count}; start fewer "
            "processes, name one as device='type:index', or use device='cpu'. To prove a layout on fewer devices let "
            "processes share them, with messages through host memory: --parallel.backend gloo (slow)"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(requested.type, index)


def check_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError where `device` does not compute in `dtype`: bfloat16 that a GPU emulates, 8 bits on any."""
    if dtype.itemsize == 1:
        raise ValueError(
            f"weights of {dtype}: 8-bit products are not here; use torch.bfloat16 or torch.float32"
        )
    if dtype != torch.bfloat16 or device.type in ("cpu", "meta"):
        return
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    # a backend that does not tell; its kernels will
    if supported is None:
        return
    try:
        is_native = supported(including_emulation=False)
    except TypeError:
        # a backend that has no emulation to leave out
        is_native = supported()
    if not is_native:
        raise ValueError(
            f"weights of {dtype} on {device}: this device does not compute in bfloat16 (NVIDIA's do from compute "
            "capability 8.0 on); use float16 (model.fp16) or float32"
        )


def bf16_slowdown(device: torch.device) -> float:
    """Seconds of a product of 256 x 256 in bfloat16 over those in float32; 1.0 off the CPU.

    A CPU without instructions for it (AVX512-BF16, AMX, Arm's BF16) emulates: 10 to 100, and this takes 0.1 s.
    """
    if device.type != "cpu":
        return 1.0
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 256, dtype=dtype)
        times = []
        for _ in range(3):
            begin = perf_counter()
            torch.mm(x, x)
            times.append(perf_counter() - begin)
        seconds.append(min(times))
    return seconds[1] / seconds[0]


def note_on_bf16(device: torch.device) -> str | None:
    """What to tell somebody who trains in bfloat16 on a CPU that emulates it; None where it is at least as fast."""
    slowdown = bf16_slowdown(device)
    if slowdown < EMULATED:
        return None
    return (
        f"bf16 products take {slowdown:.0f} x float32's here: this CPU has no instructions for them"
    )


def reading_waits(device: torch.device) -> bool:
    """Whether reading a value of this device makes the host wait for all that was asked of it before."""
    return device.type != "cpu"


def has_streams(device: torch.device) -> bool:
    """Whether copies from this device can run beside its other work, into pinned memory."""
    return device.type != "cpu"


class HostCopy:
    """One number on its way to the host; `read()` waits for this copy alone, not for what was asked after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrival: Any = None
        if not has_streams(tensor.device):
            self._copy = tensor.detach().clone()
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(tensor.detach(), non_blocking=True)
        self._arrival = torch.Event(tensor.device)
        self._arrival.record()

    def read(self) -> float:
        """The number, on the host; waits for its copy only."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return float(self._copy)


def started_processes() -> int:
    """Processes that torchrun started, WORLD_SIZE; 1 where that is not set, or set to nothing.

    Raises ValueError: it is no number.
    """
    world_size_text = os.environ.get("WORLD_SIZE") or "1"
    try:
        return int(world_size_text)
    except ValueError:
        raise ValueError(
            f"WORLD_SIZE={world_size_text!r} is no number of ranks; unset it"
        ) from None


def expect_world(world_size: int) -> None:
    """Raise ValueError if torchrun started several processes and nobody joined them: each would train alone."""
    started = started_processes()
    if started > 1 and not pg.is_initialized():
        raise ValueError(
            f"torchrun started {started} processes, this one sees {world_size}: call "
            "torch.distributed.init_process_group() first, or use parallel_state.launch()"
        )


def check_backend(backend: str | None) -> None:
    """Raise ValueError for a backend, or one in "cpu:gloo,cuda:nccl", that this torch was built without."""
    if backend is None:
        names = []
    else:
        names = [part.rpartition(":")[2] for part in backend.lower().split(",")]
    available = pg.available_backends()
    missing = [name for name in names if name in pg.BUILT_IN and name not in available]
    if missing:
        raise ValueError(
            f"backend {backend!r}: this torch was built without {', '.join(missing)}; it has "
            f"{', '.join(available) or 'none'}. Leave parallel.backend out for the device's own"
        )


def join_world(
    device: str | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = pg.DEFAULT_TIMEOUT_S,
) -> torch.device:
    """Join torchrun's world (WORLD_SIZE and RANK set) if nobody did; a single process has none. This rank's device.

    The backend is gloo for CPU tensors and the accelerator's own beside it. `backend="gloo"` with an accelerator is
    the staged path: processes may share a device, and their messages travel through host memory.
    Raises ValueError: a device that is not there, a backend that this torch was built without.
    """
    check_backend(backend)
    this_device = local_device(device, shared=backend == "gloo")
    if started_processes() > 1 and not pg.is_initialized():
        pg.init_world(backend or ("gloo" if this_device.type == "cpu" else None), timeout_s)
    return this_device


def launch(
    device: str | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = pg.DEFAULT_TIMEOUT_S,
) -> "Launched":
    """`with launch() as device`: `join_world`, and leave it at the end, error or not. `device` is this rank's."""
    return Launched(partial(join_world, device, backend=backend, timeout_s=timeout_s))


class Launched(ContextDecorator):
    """A world that is left once: behind `with`, or where the program ends, for whoever entered by hand.

    No generator: one that is garbage leaves by itself, where its last reference goes, and of a program that ends by
    an exception this is after Python has emptied the modules.
    """

    def __init__(self, join: Callable[[], torch.device]) -> None:
        self._join = join
        self._is_to_leave = False

    def __enter__(self) -> torch.device:
        self._is_to_leave = not pg.is_initialized()
        if self._is_to_leave:
            atexit.register(self._leave)
        try:
            return self._join()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._is_to_leave:
            self._is_to_leave = False
            atexit.unregister(self._leave)
            pg.destroy_world()
