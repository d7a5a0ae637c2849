"""A batch of one tensor rank for all of them."""

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
    group, device = ps.group("tp"), ps.device
    mine = None if data is None else {key: (tuple(data[key].shape), str(data[key].dtype)) for key in keys}
    first = all_gather_objects(mine, group)[0]
    if wrong := [f"{key} is {found}" for key, (_, found) in first.items() if found != str(datatype)]:
        raise ValueError(f"{len(wrong)} of {len(keys)} tensors are not {datatype}: {', '.join(wrong)}; convert them")
    made = {}
    for key, (shape, _) in first.items():
        own = data is not None and ps.index("tp") == 0
        value = (
            data[key].to(device).contiguous()
            if own and data is not None
            else torch.empty(shape, dtype=datatype, device=device)
        )
        made[key] = broadcast(value, group)
    return made
