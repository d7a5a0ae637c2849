"""In which dtype parameters are updated: float32 main weights of 16-bit weights, else the weights' own dtype."""

import torch

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig


def main_dtype(shard: DataParallel, config: OptimizerConfig) -> torch.dtype:
    """The one dtype in which everything is updated. Raises ValueError: several, complex ones, float16 without main
    weights."""
    first_name: dict[torch.dtype, str] = {}
    for buffer in shard.buffers:
        dtype = buffer.weights.dtype
        names = [segment.name for segment in buffer.segments]
        if dtype == torch.float16 and not config.main_params:
            raise ValueError(
                f"main_params=False rounds to bfloat16, but {names[0] if names else 'a weight'} is float16; use "
                "bfloat16 weights, or main_params=True"
            )
        if not names:  # this rank updates nothing of the bucket
            continue
        if dtype.is_complex:
            raise ValueError(
                f"{names[0]} is {str(dtype).removeprefix('torch.')}, which none of the fused updates knows; "
                "hold it as a real parameter of one dim more (torch.view_as_real) and view it as complex in forward"
            )
        first_name.setdefault(torch.float32 if dtype.itemsize < 4 else dtype, names[0])
    if len(first_name) > 1:
        listed = " and ".join(
            f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in first_name.items()
        )
        raise ValueError(
            f"one optimizer updates parameters of 1 dtype, these are of {len(first_name)}: {listed}; build the model "
            "with one params_dtype (16-bit weights count as float32)"
        )
    return next(iter(first_name), torch.float32)
