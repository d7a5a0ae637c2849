"""Debug mode: are all ranks of a group making the same call?"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel_state.collectives.groups import Group

_HERE = str(Path(__file__).parent)
_BYTES = 240  # of a description on the wire


def _call_site() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"


def compare_across_ranks(op: str, x: Tensor, group: Group) -> None:
    """Compare (op, shape, dtype, call site) over `group` before the collective itself.

    Raises RuntimeError on every rank, naming what each rank was about to do, where one differs;
    or on those that came, where one did not within the group's timeout.
    """
    mine = f"{op} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} at {_call_site()}"
    text = torch.zeros(_BYTES, dtype=torch.uint8)
    encoded = mine.encode()[:_BYTES]
    text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    text = text.to(x.device)
    everyone = [torch.empty_like(text) for _ in range(group.size)]
    work = dist.all_gather(everyone, text, group=group.process_group, async_op=True)
    try:
        work.wait(group.timeout)
    except RuntimeError as error:
        raise RuntimeError(f"group {group.name}: not every one of the ranks {group.ranks} came to {mine}") from error
    said = [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in everyone]
    if len(set(said)) > 1:
        lines = "\n".join(f"  rank {rank}: {line}" for rank, line in zip(group.ranks, said, strict=True))
        raise RuntimeError(f"the ranks of group {group.name} make different collective calls:\n{lines}")
