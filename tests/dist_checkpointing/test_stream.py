"""Arrays of a checkpoint in an order: read ahead, by each reader, into memory that is used again."""

import numpy as np
import pytest
import torch

from core.dist_checkpointing import save
from core.dist_checkpointing.reading import direct
from core.dist_checkpointing.reading import stream as streaming
from core.dist_checkpointing.reading.lazy import lazy_tensors, read_in_order
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.parallel_state import ParallelState
from core.parallel_state.flat import whole

STATE = {f"t{i}": torch.randn(5 + i, 7, generator=torch.Generator().manual_seed(i)) for i in range(9)}
STATE |= {"large": torch.randn(40, 30), "half": torch.randn(6, 3).bfloat16(), "none": torch.tensor(3.0)}


@pytest.fixture
def checkpoint(tmp_path):
    save(STATE, str(tmp_path / "ckpt"), ps=ParallelState.single("cpu"))
    return tmp_path / "ckpt"


@pytest.fixture(params=["direct", "tensorstore"])
def small(request, monkeypatch):
    """Batches of two small arrays; the large one is over the budget."""
    monkeypatch.setattr(direct, "FAST", request.param == "direct")
    monkeypatch.setattr(streaming, "BATCH_BYTES", 300)
    monkeypatch.setattr(streaming, "BUDGET", 2000)


def test_a_tensor_holds_until_the_next_one_is_asked_for(checkpoint, small):
    stored, order = lazy_tensors(checkpoint), [*STATE, *reversed(STATE)]
    addresses = []
    for name, tensor in zip(order, read_in_order([(stored[name], None) for name in order]), strict=True):
        assert torch.equal(tensor, STATE[name]) and tensor.dtype == STATE[name].dtype
        addresses.append(tensor.data_ptr())
    assert len(set(addresses)) < len(addresses)  # the same memory again


def test_arrays_of_their_own_stay(checkpoint, small):
    stored = StoredCheckpoint.open(str(checkpoint))
    found = list(streaming.stream(stored, [(name, whole(stored.shape(name))) for name in STATE]))
    for name, array in zip(STATE, found, strict=True):
        assert np.array_equal(array, STATE[name].view(torch.uint16) if name == "half" else STATE[name])


def test_damage_is_named(checkpoint, small):
    (cell,) = [path for path in (checkpoint / "t4").rglob("*") if path.is_file() and path.name != "zarr.json"]
    data = bytearray(cell.read_bytes())
    data[3] ^= 1
    cell.write_bytes(data)
    stored = lazy_tensors(checkpoint)
    with pytest.raises(ValueError, match="t4"):
        list(read_in_order([(stored[name], None) for name in STATE]))
