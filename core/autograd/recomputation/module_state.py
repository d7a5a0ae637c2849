"""The state that a recomputed forward must find as the first run did, and must leave as it is now.

Buffers (running statistics, power iterations, moving averages) and attributes of modules, random numbers, autocast.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from core.autograd.proxy import has_compiled_code

# bytes that are always copied, rather than asked whether they were written
SMALL = 1 << 16
_ABSENT: Any = object()
_HOLDERS = (list, tuple, dict, set)


def _is_norm(module: nn.Module) -> bool:
    """torch's own, which in training compute the same whatever their statistics are."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


def _set_buffer(owner: nn.Module, name: str, value: Tensor | None) -> None:
    if isinstance(owner, torch.jit.ScriptModule):
        setattr(owner, name, value)
    else:
        owner._buffers[name] = value


def _set_attribute(owner: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value


class _BufferBefore:
    """One buffer before a first run: itself, how often it had been written, and a copy where that is needed."""

    def __init__(self, owner: nn.Module, name: str, buffer: Tensor, copy: Tensor | None) -> None:
        self.owner = owner
        self.name = name
        self.buffer = buffer
        self.copy = copy
        self.version = 0 if buffer.is_inference() else buffer._version

    def was_written(self) -> bool:
        """Whether it was written since: in place, by another tensor, or (with a copy) by `.data`, unseen by torch."""
        current = getattr(self.owner, self.name)
        if current is not self.buffer or (
            not current.is_inference() and current._version != self.version
        ):
            return True
        return self.copy is not None and not torch.equal(current, self.copy)


class StateBefore:
    """The state of modules before a first run.

    attributes: (module, name, value) of those that the run changed. leaks_tensors: it put tensors there.
    """

    def __init__(
        self,
        buffers: Sequence[_BufferBefore] = (),
        all_attributes: Sequence[tuple[nn.Module, dict[str, Any]]] = (),
    ) -> None:
        self.buffers = buffers
        self.all_attributes = all_attributes
        self.attributes: list[tuple[nn.Module, str, Any]] = []
        self.leaks_tensors = False


def _holds_tensor(value: Any) -> bool:
    """Whether it is a tensor, or a list, tuple, dict or set with one."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) in _HOLDERS:
        items = value.values() if type(value) is dict else value
        return any(isinstance(item, Tensor) for item in items)
    return False


class ModuleState:
    """The state of a module that is run twice per microbatch.

    Small buffers are copied before each first run; of large ones those that were seen to be written. Norms of torch
    write into copies in the second run. Attributes are looked at, not copied: what changes inside an object
    (a list that is appended to) is not seen.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._first_run_done = False
        self._written_buffers: set[tuple[int, str]] = set()
        self._modules: list[nn.Module] = []
        self._norms: list[nn.Module] = []
        self._owners: list[nn.Module] = []
        self.refresh(list(module.modules()) if module is not None else [])

    def refresh(self, modules: list[nn.Module]) -> None:
        """The module has these submodules now."""
        if modules == self._modules:
            return
        self._modules = modules
        self._norms = [submodule for submodule in modules if _is_norm(submodule)]
        norms = {id(submodule) for submodule in self._norms}
        self._owners = [submodule for submodule in modules if id(submodule) not in norms]

    @property
    def compiled(self) -> bool:
        """Whether submodules are compiled: no dispatch mode of torch sees what those do."""
        return any(map(has_compiled_code, self._modules))

    @property
    def scripted(self) -> bool:
        """Whether submodules are TorchScript: a later run, optimised meanwhile, may keep other tensors."""
        return any(isinstance(submodule, torch.jit.ScriptModule) for submodule in self._modules)

    def before(self) -> StateBefore:
        """Before a first run."""
        before: list[_BufferBefore] = []
        # one buffer of two modules stays one
        copies: dict[int, Tensor] = {}
        for owner in self._owners:
            if not owner._buffers:
                continue
            for name, buffer in owner._buffers.items():
                if buffer is None or buffer.is_meta:
                    continue
                is_known_written = (id(owner), name) in self._written_buffers
                # before the first run ever, nothing is known of large buffers either
                needs_copy = not self._first_run_done or buffer.nbytes <= SMALL or is_known_written
                if needs_copy and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                before.append(_BufferBefore(owner, name, buffer, copies.get(id(buffer))))
        return StateBefore(
            before, [(submodule, submodule.__dict__.copy()) for submodule in self._modules]
        )

    def after(self, before: StateBefore) -> None:
        """After the first run: only what the second one will need stays in `before`.

        Raises RuntimeError: a large buffer that was not written before was now.
        """
        for module, attributes_before in before.all_attributes:
            current = module.__dict__
            if len(current) == len(attributes_before) and all(
                map(is_, current.values(), attributes_before.values())
            ):
                continue
            for name in {**attributes_before, **current}:
                old_value = attributes_before.get(name, _ABSENT)
                new_value = current.get(name, _ABSENT)
                if old_value is new_value:
                    continue
                before.leaks_tensors = before.leaks_tensors or _holds_tensor(new_value)
                # what was made once and for all (hooks installed, a note of it) is there in the second run
                if old_value is not _ABSENT or _holds_tensor(new_value):
                    before.attributes.append((module, name, old_value))
        before.all_attributes = ()
        if not self._first_run_done:
            self._first_run_done = True
            for saved in before.buffers:
                if saved.buffer.nbytes > SMALL and saved.was_written():
                    self._written_buffers.add((id(saved.owner), saved.name))
        for saved in before.buffers:
            if saved.copy is None and saved.was_written():
                self._written_buffers.add((id(saved.owner), saved.name))
                raise RuntimeError(
                    f"the buffer {saved.name} of {list(saved.buffer.shape)} of a recomputed "
                    f"{type(saved.owner).__name__} was written for the first time after several "
                    "forwards, which cannot be repeated; the next step can"
                )
        needed = []
        for saved in before.buffers:
            if (
                saved.buffer.nbytes <= SMALL
                or (id(saved.owner), saved.name) in self._written_buffers
            ):
                needed.append(saved)  # noqa: PERF401
        before.buffers = needed

    def restore(self, before: StateBefore) -> None:
        """After a first run that will be tried again: as before it."""
        for module, name, value in before.attributes:
            _set_attribute(module, name, value)
        # it did not end
        for module, attributes_before in before.all_attributes:
            module.__dict__.update(attributes_before)
        for saved in before.buffers:
            _set_buffer(saved.owner, saved.name, saved.buffer)
            if saved.copy is not None:
                with torch.no_grad():
                    saved.buffer.copy_(saved.copy)

    @contextmanager
    def with_state(self, before: StateBefore) -> Iterator[None]:
        """Around a second run."""
        current: list[tuple[nn.Module, str, Tensor | None]] = []
        copies: dict[int, Tensor] = {}
        for saved in before.buffers:
            current.append((saved.owner, saved.name, getattr(saved.owner, saved.name)))
            if saved.copy is not None:
                _set_buffer(
                    saved.owner, saved.name, copies.setdefault(id(saved.copy), saved.copy.clone())
                )
        attributes = [(m, name, m.__dict__.get(name, _ABSENT)) for m, name, _ in before.attributes]
        for submodule, name, value in before.attributes:
            _set_attribute(submodule, name, value)
        # in training they do not read their statistics
        for norm in self._norms:
            if norm.training:
                for name, buffer in list(norm._buffers.items()):
                    if buffer is not None:
                        current.append((norm, name, buffer))
                        norm._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for owner, name, buffer in current:
                _set_buffer(owner, name, buffer)
            for submodule, name, value in attributes:
                _set_attribute(submodule, name, value)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The CPU's, and the device's own."""
    if device.type in ("cpu", "meta"):
        device_state = None
    else:
        device_state = torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), device_state


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Set the CPU's and the device's generator to what `random_state` gave."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


def same_random_state(
    before: tuple[Tensor, Tensor | None], after: tuple[Tensor, Tensor | None]
) -> bool:
    """Whether nothing was drawn between two calls of `random_state`."""
    same_on_device = before[1] is None or (
        after[1] is not None and torch.equal(before[1], after[1])
    )
    return torch.equal(before[0], after[0]) and same_on_device


class Autocast:
    """Whether a kind of device casts, and to what."""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self.available = torch.amp.is_autocast_available(self.device_type)
        self.enabled = self.available and torch.is_autocast_enabled(self.device_type)
        self.dtype = torch.get_autocast_dtype(self.device_type) if self.available else None

    def rerun(self, call: Callable[[], list]) -> list:
        """`call()` as it was then."""
        if not self.available or not (self.enabled or torch.is_autocast_enabled(self.device_type)):
            return call()
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled):
            return call()
