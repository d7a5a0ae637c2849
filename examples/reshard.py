"""A checkpoint knows no layout: saved by two tensor-parallel ranks, read by three, copied offline for three.

python examples/reshard.py [DIRECTORY]

One process plays all ranks. Under torchrun each would hold its own part, and the lines would be the same; a model
says by itself what its parts are: `model.sharded_state_dict(prefix="")`.
"""

import sys
import tempfile

import torch

from core import dist_checkpointing
from core.dist_checkpointing import ShardedTensor
from core.dist_checkpointing.__main__ import main as command

LAYERS, HIDDEN, FFN = 4, 512, 2304
NAME = "model/decoder.layers.mlp.linear_fc2.weight"  # one array for all layers


def part(weight: torch.Tensor, layer: int, rank: int, ranks: int) -> ShardedTensor:
    """What `rank` of `ranks` holds of one layer's weight [h, f/ranks]."""
    offsets = (
        (0, layer, LAYERS),
        (2, rank, ranks),
    )  # (axis, position, parts), the stack of layers first
    return ShardedTensor.from_rank_offsets(NAME, weight, *offsets, prepend_axis_num=1)


def run(folder: str) -> None:
    """Save at TP=2, load at TP=3, then the same offline."""
    path, copy = f"{folder}/step-00000001", f"{folder}/for-tp3"
    torch.manual_seed(0)
    weights = torch.randn(LAYERS, HIDDEN, FFN)
    saved = [
        part(half, i, rank, 2)
        for i in range(LAYERS)
        for rank, half in enumerate(weights[i].chunk(2, dim=1))
    ]
    dist_checkpointing.save({"fc2": saved, "step": 1}, path)

    third = FFN // 3
    for source in (path, copy):
        for rank in range(3):
            mine = [torch.empty(HIDDEN, third) for _ in range(LAYERS)]
            dist_checkpointing.load(
                {"fc2": [part(w, i, rank, 3) for i, w in enumerate(mine)]}, source
            )
            wanted = weights[:, :, rank * third : (rank + 1) * third]
            worst = (torch.stack(mine) - wanted).abs().max()
            print(f"saved by 2 ranks, read by rank {rank} of 3: max |difference| {worst:.1f}")
        if source == path:
            print("\nTP=4 needs no copy, TP=3 would read parts of pieces:")
            command(["reshard", path, f"{folder}/for-tp4", "--tp", "4"])
            command(["reshard", path, copy, "--tp", "3"])
            command(["diff", path, copy])
            print("\nFrom the copy:")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            run(made)
