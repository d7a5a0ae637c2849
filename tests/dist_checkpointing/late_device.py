"""In an accelerator's place: streams that do nothing until somebody waits, and memory that counts as pinned."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode

from core.parallel_state import environment
from tests.training.host_reads import as_on_an_accelerator


class LateEvent:
    def __init__(self, stream, position):
        self.stream, self.position = stream, position

    def synchronize(self):
        device = self.stream.device
        device.host_waits.append("training" if threading.current_thread() is device.trainer else "copying")
        self.stream.run(self.position)


class LateStream:
    """Work asked of it is done in its order, when an event behind it is waited for."""

    def __init__(self, device, name):
        self.device, self.name, self.asked, self.done = device, name, [], 0

    def ask(self, work):
        self.asked.append(work)

    def record_event(self):
        self.device.log.append(f"{self.name} records")
        return LateEvent(self, len(self.asked))

    def wait_event(self, event):
        self.device.log.append(f"{self.name} waits for {event.stream.name}")
        self.ask(lambda: event.stream.run(event.position))

    def wait_stream(self, stream):
        self.wait_event(LateEvent(stream, len(stream.asked)))

    def run(self, position=None):
        with self.device.lock:
            stop = len(self.asked) if position is None else position
            while self.done < stop:
                self.done += 1
                self.asked[self.done - 1]()

    def __enter__(self):
        self.device.active.append(self)

    def __exit__(self, *_):
        self.device.active.pop()


class LateDevice(TorchFunctionMode):
    """log: what streams were asked for. pinned: sizes of pinned memory. host_waits: who waited for an event."""

    def __init__(self):
        super().__init__()
        self.log, self.pinned, self.host_waits, self.active = [], [], [], []
        self.lock, self.trainer = threading.RLock(), threading.current_thread()
        self.current = LateStream(self, "current")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.pop("pin_memory", False):
            self.pinned.append(args[0])
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking") and self.active:
            self.log.append(f"{self.active[-1].name} copies")
            self.active[-1].ask(lambda: func(*args))
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def late_device():
    """Inside, the CPU is an accelerator whose streams are late; yields the `LateDevice`."""
    with pytest.MonkeyPatch.context() as patch, as_on_an_accelerator(), LateDevice() as device:
        patch.setattr(environment.has_streams, "__code__", (lambda device: True).__code__)
        patch.setattr(torch, "Stream", lambda _: LateStream(device, "side"))
        patch.setattr(torch.accelerator, "current_stream", lambda _: device.current)
        yield device
