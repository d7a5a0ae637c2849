"""Layers that run as code which torch compiled: one graph for all layers of a kind, under hooks and regions."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from core.autograd.linear import make_compilable
from core.autograd.proxy import LinearProxy
from core.autograd.recomputation.policy import outermost

OLDEST_TORCH = (2, 12)


class CompiledForward(LinearProxy):
    """Runs a module's forward as compiled code in training mode, and as it is in eval mode or inside of a
    `TorchDispatchMode` (a counter of FLOPs or bytes), in which torch compiles nothing.

    Only the forward is compiled, not the call: hooks (ZeRO-3 gathers in one) and regions stay around the graph.

    name: of the module, for errors. may_break: whether the graph may be cut where torch cannot trace on.
    """

    is_compiled = True

    def __init__(self, module: nn.Module, name: str, *, backend: Any, may_break: bool) -> None:
        super().__init__(module)
        self._name = name
        self._may_break = may_break
        # the class's function and not a bound method: modules of one class share their graphs
        if self.replaced is None:
            forward = type(module).forward
        else:
            forward = self.replaced
        self._arguments = (module,) if self.replaced is None else ()
        self._compiled = torch.compile(forward, backend=backend, fullgraph=not may_break)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled forward. Raises ValueError: it is not one graph, and has to be."""
        # validation, generation: other shapes with every token
        if not self.module.training or is_in_torch_dispatch_mode(include_infra_modes=False):
            return self.call_replaced(*args, **kwargs)
        try:
            return self._compiled(*self._arguments, *args, **kwargs)
        except RuntimeError as error:
            # a RuntimeError of the model's own forward stays what it is
            if not isinstance(error, (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
                raise
            reason = next(
                (line.strip() for line in str(error).splitlines() if line.strip()),
                type(error).__name__,
            )
            raise ValueError(
                f"compile=layer: {self._name}, a {type(self.module).__name__}, does not become 1 graph: {reason}. "
                "Mend its forward, allow graphs in parts (training.compile_fallback=true), or use "
                "training.compile=none"
            ) from error


class CompileHandle:
    """The layers that were compiled; `remove()` gives them their own forward back."""

    def __init__(self, names: list[str], forwards: list[CompiledForward]) -> None:
        self.names = names
        self._forwards = forwards

    def remove(self) -> None:
        """Undo: layers run as they are written."""
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def check_torch(version: str = torch.__version__) -> None:
    """Raise ValueError for a torch whose compiled layers, which share a graph, give other gradients."""
    major, minor = (int(number) for number in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        raise ValueError(
            f"compile=layer needs torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, this is {version}, whose compiled layers"
            " give wrong gradients where several share one graph; use a newer torch, or training.compile=none"
        )


def check_compiler(device: torch.device) -> None:
    """Raise ValueError where torch.compile has no compiler for this device, or is too old."""
    check_torch()
    if device.type != "cpu":
        if find_spec("triton") is None:
            raise ValueError(
                f"compile=layer needs triton for device {device.type}, which is not installed; pip install triton, "
                "or training.compile=none"
            )
        return
    # here, because inductor takes long to import and only a compiled run needs it
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "compile=layer needs a C++ compiler on the CPU, and 0 were found; install g++ or clang++, or set CXX, or "
            "training.compile=none"
        ) from None


def compile_layers(
    module: nn.Module, *, backend: Any = "inductor", may_break: bool | None = None
) -> CompileHandle:
    """Compile every layer (each element of a ModuleList or ModuleDict), in place; parameter names unchanged.

    Before `apply_recompute` and the executor, so that regions run the compiled code. Graphs are made in the first
    two steps. may_break: whether a layer may become several graphs; default: only layers of this package, which break
    at the collectives of tensor parallelism and at dropout.
    Raises ValueError: a module without layers; a torch that is too old.
    """
    check_torch()
    try:
        layers = outermost(module, "layer")
    except ValueError:
        raise ValueError(
            f"compile=layer: {type(module).__name__} has 0 layers (elements of a ModuleList or ModuleDict); use "
            "training.compile=none, and torch.compile it yourself"
        ) from None
    forwards = []
    for name, layer in layers.items():
        if may_break is None:
            breaks = type(layer).__module__.startswith("core.")
        else:
            breaks = may_break
        forwards.append(CompiledForward(layer, name, backend=backend, may_break=breaks))
        forwards[-1].install()
        for parameter in layer.parameters():
            make_compilable(parameter)
    return CompileHandle(list(layers), forwards)
