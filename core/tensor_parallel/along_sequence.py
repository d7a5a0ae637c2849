"""Finds modules of a user's own that look along the sequence where each tensor rank sees its rows only.

Under sequence parallelism what stands between parallel linears gets [s/tp, b, h]. What works on each token by itself
is right there; a convolution, a sum or an order along the sequence is of this rank's rows. So in the model's first
forward each such module runs twice more, once on rotated rows: the output of what works by token is rotated alike.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from core.autograd.recomputation.lazy_product import linears_of_region

# of the largest output: more than rounding of 16-bit numbers
DIFFERENT = 0.02


def probe_foreign_modules(model: nn.Module) -> None:
    """Warns, once for each, in the next forward of `model`, where sequence parallelism is on."""
    for name, module in _outermost_foreign(model, ""):
        _Probe(name, module)


def _outermost_foreign(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are not ours, without what they hold; not those that see heads, which have all tokens."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        if child_name == "core_attention" or child_name.endswith(("q_layernorm", "k_layernorm")):
            continue
        if type(child).__module__.startswith(("core.", "torch.nn.modules.container")):
            yield from _outermost_foreign(child, full_name)
        else:
            yield full_name, child


class _Probe:
    """A forward hook that takes itself out."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._handle = module.register_forward_hook(self, with_kwargs=True)

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._handle.remove()
        rows = args[0] if args else None
        if not isinstance(rows, Tensor) or not isinstance(output, Tensor) or output.dim() != 3:
            return
        if rows.shape[:2] != output.shape[:2] or rows.shape[0] < 2:
            return
        # What the real forward left on the module (an auxiliary loss, a running mean) must stay. Outside of a
        # recomputed region, which counts its linears.
        before = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
        buffers = [(buffer, buffer.clone(), buffer._version) for buffer in module.buffers()]
        token = linears_of_region.set(None)
        try:
            with torch.no_grad(), torch.random.fork_rng():
                module.eval()
                plain = module.forward(*args, **kwargs)
                rotated = module.forward(rows.roll(1, 0), *args[1:], **kwargs)
        finally:
            linears_of_region.reset(token)
            for part, attributes, own_buffers in before:
                part.__dict__.clear()
                part.__dict__.update(attributes)
                part._buffers.clear()
                part._buffers.update(own_buffers)
            for buffer, value, version in buffers:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(value)
        difference = (rotated - plain.roll(1, 0)).abs().max()
        size = plain.abs().max()
        if difference > DIFFERENT * size:
            warnings.warn(
                f"{self._name} ({type(module).__name__}) looks along the sequence, and sees this tensor rank's "
                f"{rows.shape[0]} rows of it, [s/tp, b, h], under sequence parallelism: "
                "core.tensor_parallel.gather_from_sequence_region before it and scatter_to_sequence_region after it "
                "give it all, or build the model with sequence_parallel=False",
                stacklevel=2,
            )
