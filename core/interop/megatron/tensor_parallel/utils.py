"""Gives the batch of one tensor rank to all of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.parallel_state import current_state
from core.parallel_state.collectives import all_gather_objects, broadcast


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors under `keys` from tensor rank 0, whose `data` alone counts. A broadcast each.

    Raises ValueError, on every rank: a tensor of another dtype.
    """
    ps = current_state()
    group = ps.group("tp")
    device = ps.device
    local_shapes = None
    if data is not None:
        local_shapes = {key: (tuple(data[key].shape), str(data[key].dtype)) for key in keys}
    shapes = all_gather_objects(local_shapes, group)[0]
    wrong = [f"{key} is {dtype}" for key, (_, dtype) in shapes.items() if dtype != str(datatype)]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(keys)} tensors are not {datatype}: {', '.join(wrong)}; convert them"
        )
    tensors = {}
    for key, (shape, _) in shapes.items():
        if data is not None and ps.index("tp") == 0:
            tensor = data[key].to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=datatype, device=device)
        tensors[key] = broadcast(tensor, group)
    return tensors
