"""Activation offload: what layers save for backward waits in host memory, and comes back before it is needed.

By torch's saved-tensor hooks around each layer's forward, so that every operation, recomputed region and schedule is
the same with it and without. On an accelerator copies go over a side stream, through pinned memory.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from core.autograd.proxy import LinearProxy, has_compiled_code, proxies_of
from core.autograd.recomputation.leaving import in_torch_func
from core.autograd.recomputation.notes import GiveBack, move_noted
from core.autograd.recomputation.policy import is_region, outermost
from core.autograd.recomputation.region import recomputed_region

LEAST_BYTES = 1024  # a smaller tensor is not worth a copy's latency


class _Stored:
    """A saved tensor in host memory, and its copy on the device while it is on its way back.

    uses: how many operations that saved it have not asked for it.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host = host
        self.device = device
        self.uses = 0
        self.returned: Tensor | None = None
        self.arrival: Any = None

    @property
    def on_accelerator(self) -> bool:
        """Whether it came from one."""
        return self.device.type != self.host.device.type


class _LayerCall:
    """What one call of a layer has sent to the host. before: the call whose result it took, next in backward."""

    def __init__(self, before: "_LayerCall | None") -> None:
        self.stored: WeakSet[_Stored] = WeakSet()
        self.is_back = False
        self.before: ReferenceType[_LayerCall] | None = None if before is None else ref(before)


class _HostCopies:
    """Sends saved tensors to the host and brings them back, on one side stream for both ways, in order."""

    def __init__(self) -> None:
        self.stored: WeakSet[_Stored] = WeakSet()
        # the call of the layer that ran last, and the memory of its result
        self.latest: tuple[_LayerCall, int] | None = None
        self._side_stream: Any = None

    def __reduce__(self) -> Any:
        return _HostCopies, ()  # a copied model has its own

    def store(self, tensor: Tensor) -> _Stored:
        """Start to copy it to the host; its own memory is free when that has ended, and nobody else needs it."""
        if tensor.device.type == "cpu":
            return _Stored(tensor.clone(), tensor.device)
        stream = self._enter(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with stream:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return _Stored(host, tensor.device)

    def bring_back(self, call: _LayerCall) -> None:
        """Start to copy back all that the call has stored and that is still needed."""
        if call.is_back:
            return
        call.is_back = True
        for stored in call.stored:
            if stored.on_accelerator and stored.returned is None:
                self._start(stored)

    def take(self, stored: _Stored) -> Tensor:
        """The tensor on its device again, for one of its uses."""
        if not stored.on_accelerator:
            return stored.host
        if stored.returned is None:  # a second backward
            self._start(stored)
        back = stored.returned
        assert back is not None
        stored.uses -= 1
        if stored.uses <= 0:
            stored.returned = None
        current = torch.accelerator.current_stream(stored.device)
        current.wait_event(stored.arrival)
        back.record_stream(current)
        return back

    def _enter(self, device: torch.device) -> Any:
        """The side stream, behind what the device was asked for so far."""
        if self._side_stream is None:
            self._side_stream = torch.Stream(device)
        self._side_stream.wait_stream(torch.accelerator.current_stream(device))
        return self._side_stream

    def _start(self, stored: _Stored) -> None:
        stream = self._enter(stored.device)
        with stream:
            stored.returned = torch.empty_like(stored.host, device=stored.device, pin_memory=False)
            stored.returned.copy_(stored.host, non_blocking=True)
            stored.arrival = stream.record_event()


class _OffloadedForward(LinearProxy):
    """Runs the layer's forward with hooks on what it saves."""

    moves_saved = True

    def __init__(self, module: nn.Module, copies: _HostCopies) -> None:
        super().__init__(module)
        self.copies = copies

    @torch.compiler.disable
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward; what it saves goes to the host, but for what lives longer than its activations."""
        no_backward = not torch.is_grad_enabled() or recomputed_region.get() is not None
        if no_backward or in_torch_func():
            return self.call_replaced(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        latest = self.copies.latest
        before = None
        if latest is not None and any(_memory_of(leaf) == latest[1] for leaf in inputs):
            before = latest[0]
        layer_call = _LayerCall(before)
        # parameters, buffers, what all layers share (masks, tables of angles), leaves whose gradient somebody wants
        lasting = {_memory_of(t) for t in (*self.module.parameters(), *self.module.buffers())}
        lasting |= {_memory_of(leaf) for leaf in inputs if leaf.is_leaf}

        # what several operations save travels once; a weak reference keeps another storage from getting its address
        seen: dict[tuple, tuple[StorageWeakRef, _Stored]] = {}

        def pack(tensor: Tensor) -> Any:
            memory = _memory_of(tensor)
            if not _is_movable(tensor) or memory in lasting:
                return tensor
            key = (
                memory,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor._version,
                tensor.dtype,
            )
            if key not in seen:
                seen[key] = StorageWeakRef(tensor.untyped_storage()), self.copies.store(tensor)
            stored = seen[key][1]
            stored.uses += 1
            layer_call.stored.add(stored)
            self.copies.stored.add(stored)
            return stored

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            # one layer ahead, so that copies run beside its backward
            self.copies.bring_back(layer_call)
            if layer_call.before is not None and (previous := layer_call.before()) is not None:
                self.copies.bring_back(previous)
            return self.copies.take(packed)

        def move(noted: Tensor) -> GiveBack:
            return partial(unpack, pack(noted))

        token = move_noted.set(move)
        try:
            with saved_tensors_hooks(pack, unpack):
                result = self.call_replaced(*args, **kwargs)
        finally:
            move_noted.reset(token)
        first = next((t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)), None)
        self.copies.latest = None if first is None else (layer_call, _memory_of(first))
        return result


def _memory_of(tensor: Tensor) -> int:
    """Which storage it lies in, as long as that lives."""
    return tensor.untyped_storage()._cdata


def _is_movable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.nbytes >= LEAST_BYTES


class OffloadHandle:
    """The layers whose activations wait in host memory; `remove()` lets them stay on the device again.

    names: of the layers.
    """

    def __init__(
        self, names: list[str], forwards: list[_OffloadedForward], copies: _HostCopies
    ) -> None:
        self.names = names
        self._forwards = forwards
        self._copies = copies

    @property
    def host_bytes(self) -> int:
        """What waits in host memory now."""
        return sum(stored.host.nbytes for stored in self._copies.stored)

    def remove(self) -> None:
        """Undo; what waits already comes back all the same."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def is_offloaded(module: nn.Module) -> bool:
    """Whether the activations of `module` or of a part of it are offloaded."""
    return any(proxy.moves_saved for part in module.modules() for proxy in proxies_of(part))


def offload_activations(
    modules: nn.Module | Mapping[Any, nn.Module], fraction: float = 1.0
) -> OffloadHandle:
    """What the first layers of each module save for backward waits in host memory until their backward.

    modules: one, or a pipeline's stages on this rank. Layers are the elements of a ModuleList or ModuleDict, as
    `apply_recompute` finds them. fraction: of each module's layers, rounded up, the first ones: theirs waits longest.
    With recomputation it is the recomputed layers' inputs that wait, and attention's output where it is kept; make
    the `Pipeline`, or apply the policy, first. Parameters, buffers and inputs without gradients (masks, tables) stay
    where they are; so does what waits between I and W. Values are the same, bit for bit.
    Raises ValueError: a fraction outside [0, 1], a module without layers; layers that are compiled, offloaded
    already, or inside a region that is recomputed as one.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction} must be between 0 (no layer) and 1 (all layers)")
    stages: Iterable[nn.Module] = [modules] if isinstance(modules, nn.Module) else modules.values()
    copies, names, chosen = _HostCopies(), list[str](), list[nn.Module]()
    for stage in stages if fraction else ():
        try:
            layers = outermost(stage, "layer")
        except ValueError as error:
            raise ValueError(f"offload_activations: {error}") from None
        count = math.ceil(fraction * len(layers))
        for name, layer in list(layers.items())[:count]:
            _refuse_layer(stage, name, layer)
            names.append(name)
            chosen.append(layer)
    forwards = [_OffloadedForward(layer, copies) for layer in chosen]
    for forward in forwards:
        forward.install()
    return OffloadHandle(names, forwards, copies)


def _refuse_layer(stage: nn.Module, name: str, layer: nn.Module) -> None:
    if any(has_compiled_code(part) for part in layer.modules()):
        raise ValueError(
            f"offload_activations: {name} is compiled, and of the tensors that compiled code saves none is known by "
            "layer; leave compile out, or use fraction=0"
        )
    if is_offloaded(layer):
        raise ValueError(f"offload_activations: {name} is offloaded already; remove() that first")
    parts = name.split(".")
    for length in range(len(parts)):
        outer = ".".join(parts[:length])
        if is_region(stage.get_submodule(outer)):
            raise ValueError(
                f"offload_activations: {name} lies inside {outer or 'a module'} that is recomputed as one and saves "
                "nothing in its forward; recompute layers ('layer') or parts of them"
            )
