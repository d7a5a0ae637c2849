"""Buffers that a forward writes (running statistics, power iterations, moving averages, counters).

A forward that runs a second time finds them as the first did, and leaves them as they are now.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

SMALL = 1 << 16  # bytes that are always copied, rather than asked whether they were written
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _is_norm(module: nn.Module) -> bool:
    """torch's own, which in training compute the same whatever their statistics are."""
    return isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn.")


def _put(owner: nn.Module, name: str, value: Tensor | None) -> None:
    if isinstance(owner, torch.jit.ScriptModule):
        setattr(owner, name, value)
    else:
        owner._buffers[name] = value


class _Kept:
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


class Buffers:
    """The buffers of a module that is run twice per microbatch.

    Small ones are copied before each first run; of large ones those that were seen to be written.
    Norms of torch are left alone in the second run instead.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module, self._tried = module, False
        self._written: set[tuple[int, str]] = set()
        self.refresh()

    def refresh(self) -> None:
        """The module may have other parts now."""
        modules = list(self._module.modules()) if self._module is not None else []
        self._norms = [m for m in modules if _is_norm(m) and m.track_running_stats]
        norms = {id(m) for m in self._norms}
        self._owners = [m for m in modules if m._buffers and id(m) not in norms]

    def before(self) -> list[_Kept]:
        """Before a first run."""
        kept: list[_Kept] = []
        copies: dict[int, Tensor] = {}  # one buffer of two modules stays one
        for owner in self._owners:
            for name, buffer in owner._buffers.items():
                if buffer is None or buffer.is_meta:
                    continue
                wanted = not self._tried or buffer.nbytes <= SMALL or (id(owner), name) in self._written
                if wanted and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                kept.append(_Kept(owner, name, buffer, copies.get(id(buffer))))
        return kept

    def after(self, kept: list[_Kept]) -> list[_Kept]:
        """After the first run: what the second one will need. Raises RuntimeError: a large buffer that was not
        written before was now."""
        if not self._tried:
            self._tried = True
            self._written = {(id(k.owner), k.name) for k in kept if k.buffer.nbytes > SMALL and k.written()}
            return [k for k in kept if k.buffer.nbytes <= SMALL or (id(k.owner), k.name) in self._written]
        for k in kept:
            if k.copy is None and k.written():
                self._written.add((id(k.owner), k.name))
                raise RuntimeError(
                    f"the buffer {k.name} of {list(k.buffer.shape)} of a recomputed {type(k.owner).__name__} was "
                    "written for the first time after several forwards, which cannot be repeated; the next step can"
                )
        return [k for k in kept if k.copy is not None]

    def put_back(self, kept: list[_Kept]) -> None:
        """After a first run that is tried again: as before it."""
        for k in kept:
            _put(k.owner, k.name, k.buffer)
            if k.copy is not None:
                with torch.no_grad():
                    k.buffer.copy_(k.copy)

    @contextmanager
    def as_before(self, kept: list[_Kept]) -> Iterator[None]:
        """Around a second run."""
        now: list[tuple[nn.Module, str, Tensor | None]] = []
        copies: dict[int, Tensor] = {}
        for k in kept:
            now.append((k.owner, k.name, getattr(k.owner, k.name)))
            if k.copy is not None:
                _put(k.owner, k.name, copies.setdefault(id(k.copy), k.copy.clone()))
        training: list[Any] = [norm for norm in self._norms if norm.training]
        for norm in training:
            norm.track_running_stats = False
            if isinstance(norm, _InstanceNorm):  # it looks at its buffers only
                now += [(norm, name, norm._buffers[name]) for name in STATISTICS]
                norm._buffers.update(dict.fromkeys(STATISTICS))
        try:
            yield
        finally:
            for norm in training:
                norm.track_running_stats = True
            for owner, name, buffer in now:
                _put(owner, name, buffer)
