"""What a forward writes on its modules: buffers (statistics, power iterations, moving averages) and attributes.

A forward that runs a second time finds them as the first did, and leaves them as they are now.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SMALL = 1 << 16  # bytes that are always copied, rather than asked whether they were written
_ABSENT: Any = object()
_HOLDERS = (list, tuple, dict, set)


def _is_norm(module: nn.Module) -> bool:
    """torch's own, which in training compute the same whatever their statistics are."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


def _put(owner: nn.Module, name: str, value: Tensor | None) -> None:
    if isinstance(owner, torch.jit.ScriptModule):
        setattr(owner, name, value)
    else:
        owner._buffers[name] = value


def _set(owner: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value


class _Buffer:
    """One buffer before a first run: itself, how often it had been written, and a copy where that is needed."""

    def __init__(self, owner: nn.Module, name: str, buffer: Tensor, copy: Tensor | None) -> None:
        self.owner, self.name, self.buffer, self.copy = owner, name, buffer, copy
        self.version = 0 if buffer.is_inference() else buffer._version

    def written(self) -> bool:
        """Whether it was since: in place, by another tensor, or (where there is a copy) past torch by `.data`."""
        now = getattr(self.owner, self.name)
        if now is not self.buffer or (not now.is_inference() and now._version != self.version):
            return True
        return self.copy is not None and not torch.equal(now, self.copy)


class Before:
    """The state of modules before a first run.

    attributes: (module, name, value) of those that it changed, once it has ended. leaves: it put tensors there.
    """

    def __init__(
        self, buffers: Sequence[_Buffer] = (), all_attributes: Sequence[tuple[nn.Module, dict[str, Any]]] = ()
    ) -> None:
        self.buffers, self.all_attributes = buffers, all_attributes
        self.attributes: list[tuple[nn.Module, str, Any]] = []
        self.leaves = False


def _holds(value: Any) -> bool:
    """Whether it is a tensor, or plainly holds one."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) in _HOLDERS:
        return any(isinstance(each, Tensor) for each in (value.values() if type(value) is dict else value))
    return False


class ModuleState:
    """The state of a module that is run twice per microbatch.

    Small buffers are copied before each first run; of large ones those that were seen to be written. Norms of torch
    write into copies in the second run. Attributes are looked at, not copied: what changes inside an object
    (a list that is appended to) is not seen.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._tried = False
        self._written: set[tuple[int, str]] = set()
        self._modules: list[nn.Module] = []
        self._norms: list[nn.Module] = []
        self._owners: list[nn.Module] = []
        self.refresh(list(module.modules()) if module is not None else [])

    def refresh(self, modules: list[nn.Module]) -> None:
        """The module has these parts now."""
        if modules == self._modules:
            return
        self._modules = modules
        self._norms = [m for m in modules if _is_norm(m)]
        norms = {id(m) for m in self._norms}
        self._owners = [m for m in modules if id(m) not in norms]

    @property
    def compiled(self) -> bool:
        """Whether parts are compiled: no mode of torch sees what those do."""
        return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in self._modules)

    @property
    def scripted(self) -> bool:
        """Whether parts are TorchScript: a later run may keep other tensors, as it is optimised meanwhile."""
        return any(isinstance(m, torch.jit.ScriptModule) for m in self._modules)

    def before(self) -> Before:
        """Before a first run."""
        kept: list[_Buffer] = []
        copies: dict[int, Tensor] = {}  # one buffer of two modules stays one
        for owner in self._owners:
            if not owner._buffers:
                continue
            for name, buffer in owner._buffers.items():
                if buffer is None or buffer.is_meta:
                    continue
                wanted = not self._tried or buffer.nbytes <= SMALL or (id(owner), name) in self._written
                if wanted and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                kept.append(_Buffer(owner, name, buffer, copies.get(id(buffer))))
        return Before(kept, [(m, m.__dict__.copy()) for m in self._modules])

    def after(self, kept: Before) -> None:
        """After the first run: only what the second one will need stays in `kept`.

        Raises RuntimeError: a large buffer that was not written before was now.
        """
        for module, old in kept.all_attributes:
            now = module.__dict__
            if len(now) == len(old) and all(map(is_, now.values(), old.values())):
                continue
            for name in {**old, **now}:
                was, is_now = old.get(name, _ABSENT), now.get(name, _ABSENT)
                if was is is_now:
                    continue
                kept.leaves = kept.leaves or _holds(is_now)
                # what was made once and for all (hooks installed, a note of it) is there in the second run
                if was is not _ABSENT or _holds(is_now):
                    kept.attributes.append((module, name, was))
        kept.all_attributes = ()
        if not self._tried:
            self._tried = True
            self._written = {(id(k.owner), k.name) for k in kept.buffers if k.buffer.nbytes > SMALL and k.written()}
        for k in kept.buffers:
            if k.copy is None and k.written():
                self._written.add((id(k.owner), k.name))
                raise RuntimeError(
                    f"the buffer {k.name} of {list(k.buffer.shape)} of a recomputed {type(k.owner).__name__} was "
                    "written for the first time after several forwards, which cannot be repeated; the next step can"
                )
        kept.buffers = [k for k in kept.buffers if k.buffer.nbytes <= SMALL or (id(k.owner), k.name) in self._written]

    def put_back(self, kept: Before) -> None:
        """After a first run that will be tried again: as before it."""
        for module, name, value in kept.attributes:
            _set(module, name, value)
        for module, old in kept.all_attributes:  # it did not end
            module.__dict__.update(old)
        for k in kept.buffers:
            _put(k.owner, k.name, k.buffer)
            if k.copy is not None:
                with torch.no_grad():
                    k.buffer.copy_(k.copy)

    @contextmanager
    def as_before(self, kept: Before) -> Iterator[None]:
        """Around a second run."""
        now: list[tuple[nn.Module, str, Tensor | None]] = []
        copies: dict[int, Tensor] = {}
        for k in kept.buffers:
            now.append((k.owner, k.name, getattr(k.owner, k.name)))
            if k.copy is not None:
                _put(k.owner, k.name, copies.setdefault(id(k.copy), k.copy.clone()))
        attributes = [(m, name, m.__dict__.get(name, _ABSENT)) for m, name, _ in kept.attributes]
        for m, name, value in kept.attributes:
            _set(m, name, value)
        for norm in self._norms:  # in training they do not read what they write
            if norm.training:
                for name, buffer in list(norm._buffers.items()):
                    if buffer is not None:
                        now.append((norm, name, buffer))
                        norm._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for owner, name, buffer in now:
                _put(owner, name, buffer)
            for m, name, value in attributes:
                _set(m, name, value)
