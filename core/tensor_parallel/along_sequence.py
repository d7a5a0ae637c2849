"""Whether a module of a user's own looks along the sequence, by what it makes of rows in another order.

What works on each token by itself gives outputs in that order. For modules that call what nobody follows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from core.autograd.recomputation.lazy_product import linears_of_region

# of the largest output: more than rounding of 16-bit numbers
DIFFERENT = 0.02


def looks_along(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> bool:
    """After a forward of `module`, rows first, which returned `output`: runs it twice more, once on shuffled rows."""
    rows = args[0] if args else None
    if not isinstance(rows, Tensor) or not isinstance(output, Tensor) or output.dim() != 3:
        return False
    if rows.shape[:2] != output.shape[:2] or rows.shape[0] < 2:
        return False
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(rows.device)
    # What the real forward left on the module (an auxiliary loss, a running mean) must stay. Outside of a
    # recomputed region, which counts its linears.
    before = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    buffers = [(buffer, buffer.clone(), buffer._version) for buffer in module.buffers()]
    token = linears_of_region.set(None)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            module.eval()
            plain = module.forward(*args, **kwargs)
            shuffled = module.forward(rows[order], *args[1:], **kwargs)
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
    difference = (shuffled - plain[order]).abs().max()
    return bool(difference > DIFFERENT * plain.abs().max())
