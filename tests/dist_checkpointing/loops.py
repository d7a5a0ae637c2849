"""`python -m tests.dist_checkpointing.loops FOLDER N`: N saves, verifies and loads in all, of a directory and of a
store in this process. A vocabulary's last cell is short, so that tensorstore writes it on local files too."""

import sys

import numpy as np
import torch

from core.dist_checkpointing import ShardedTensor, load, save
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.stream import stream
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.parallel_state.flat import whole

ROWS = 1003


def state(number):
    table = ShardedTensor("table", torch.full((ROWS, 8), float(number)), (ROWS, 8), (0, 0), tp_dim=0)
    return {"table": table, **{f"w{i}": torch.full((64, 9), float(number + i)) for i in range(4)}, "step": number}


def streamed(url, number):
    """What commands read, by tensorstore also from local files."""
    stored = StoredCheckpoint.open(url)
    wanted = [(key, whole(stored.shape(key))) for key in stored.keys]
    for (key, _), values in zip(wanted, stream(stored, wanted), strict=True):
        assert np.all(values == number + (int(key[1:]) if key[0] == "w" else 0)), key


def rounds(folder, count):
    """Four operations each."""
    urls = [f"{folder}/x", "memory://loops/x"]
    for number in range(count):
        url = urls[number % 2]
        save(state(number), url)
        assert check(open_checkpoint_dir(url), full=True) == []
        found = load(state(-9), url)
        assert found["step"] == number and bool((found["w3"] == number + 3).all())
        streamed(url, number)


if __name__ == "__main__":
    rounds(sys.argv[1], int(sys.argv[2]) // 4)
