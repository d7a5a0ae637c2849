"""From a device to the host beside the training: one pinned slab, a side stream, one event per save.

The host asks for all copies at once and waits for none; the device does them beside the next forward and backward.
Who changes a weight lets its stream wait for the event (`hold_updates`), who reads the slab waits for it on the host.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from core.dist_checkpointing.planning.exchange import Cells, LocalCell
from core.dist_checkpointing.writing.async_save import BackgroundCall
from core.dist_checkpointing.writing.slab import aligned

Copy = Callable[[Cells], None]  # cells into the writer's slab


class PinnedStage:
    """One block of pinned memory for the tensors of a save, kept from one save to the next.

    Its views hold what was sent once `wait` has returned, and until the next `send`. Copies to pageable memory would
    run at a tenth of the bus, and make the host wait for each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._stream: Any = None
        self._arrival: Any = None  # event behind the last copy
        # a temporary that was freed before would be written over
        self._sources: Sequence[Tensor] = ()

    def reserve(self, size: int) -> None:
        """Make it at least `size` bytes. Raises RuntimeError: no memory."""
        if size > self._memory.numel():
            # the old one goes before the new one comes
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start to copy all of them, as they are after what the current stream was asked for; views of the slab.

        `reserve` made room: the sum of `staged_bytes`. The host waits for nothing.
        """
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        views = []
        start = 0
        self._sources = tensors
        with self._stream:
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                view = self._memory[start : start + size].view(tensor.dtype).view(tensor.shape)
                views.append(view.copy_(tensor, non_blocking=True))
                start = aligned(start + size)
            self._arrival = self._stream.record_event()
        return views

    def hold_updates(self) -> None:
        """What the current stream is asked for from now on runs behind the copies; the host goes on."""
        # the thread that waits takes it away
        arrival = self._arrival
        if arrival is not None:
            torch.accelerator.current_stream(self._device).wait_event(arrival)

    def wait(self) -> None:
        """Block this thread until everything has arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self._arrival = None
        self._sources = ()


def staged_bytes(tensors: Iterable[Tensor]) -> int:
    """What they take of a pinned slab: each begins where any dtype may."""
    return sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


class CopyBesideStep:
    """A save's local cells on their way into the writer's slab, beside the training; then `hand_over()`.

    Cells of the device go through `stage`; what lies on the host (offloaded states) a thread copies first. `reserve`,
    `start`, then `before_update` before anything changes, and `wait`, which raises what went wrong.
    """

    def __init__(self, cells: Iterable[LocalCell], stage: PinnedStage) -> None:
        self._stage = stage
        self._on_host: list[LocalCell] = []
        self._on_device: list[LocalCell] = []
        for cell in cells:
            (self._on_device if cell.on_device else self._on_host).append(cell)
        self._pieces = [cell.pieces() for cell in self._on_device]
        self._host_copied = threading.Event()
        self._thread: BackgroundCall | None = None

    def reserve(self) -> None:
        """Pinned memory for all of them. Raises RuntimeError: no memory."""
        self._stage.reserve(staged_bytes(self._tensors()))

    def _tensors(self) -> Iterator[Tensor]:
        return (piece.bits for pieces in self._pieces for piece in pieces if piece.array is None)

    def start(self, copy: Copy, hand_over: Callable[[], None]) -> None:
        """Ask for all copies; the host waits for none of them."""
        sent = iter(self._stage.send(list(self._tensors())))
        arriving = []
        for cell, pieces in zip(self._on_device, self._pieces, strict=True):
            # a cell that is partly on the host: that part is copied now, the thread comes to it too late
            copies = []
            for piece in pieces:
                if piece.array is None:
                    copies.append((piece.box, next(sent)))
                else:
                    copies.append((piece.box, piece.bits.clone()))
            arriving.append(cell.on_host(copies))
        self._pieces = []

        def finish() -> None:
            try:
                # the host's first: `before_update` holds the training until they are copied
                copy(cell.owned() for cell in self._on_host)
            finally:
                # also after an error, or the training would wait for ever
                self._host_copied.set()
            self._stage.wait()
            copy(cell.owned() for cell in arriving)
            hand_over()

        self._thread = BackgroundCall(finish, threaded=True)

    def before_update(self) -> None:
        """The current stream waits for the copies; the host only for those of what lies on the host."""
        self._host_copied.wait()
        self._stage.hold_updates()

    def wait(self) -> None:
        """Block until all is copied and handed over. Raises what went wrong."""
        assert self._thread is not None
        self._thread.wait()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is not None and self._thread.done()
