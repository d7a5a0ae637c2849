"""Copies beside the step: one pinned slab, no wait of the training, and no update that overtakes them."""

import numpy as np
import pytest
import torch

from core.dist_checkpointing import CheckpointManager, save
from core.dist_checkpointing.format.arrays import ArrayInfo
from core.dist_checkpointing.planning.exchange import LocalCell, ShardBits
from core.dist_checkpointing.writing.async_save import WriterProgram
from core.dist_checkpointing.writing.staging import CopyBesideStep, PinnedStage, staged_bytes
from tests.dist_checkpointing import small
from tests.dist_checkpointing.late_device import late_device
from tests.parity.test_checkpoint import digest
from tests.training.host_reads import host_reads


def values():
    return {"a": torch.arange(1000.0), "b": torch.arange(24).reshape(4, 6).to(torch.bfloat16).T, "c": torch.ones(3)}


def test_the_step_goes_on_and_its_update_stays_behind_the_copy(tmp_path, single):
    """The files are those of a save that waits, and the training waited for nothing."""
    save(small.state(1), tmp_path / "plain", ps=single)
    with late_device() as device:
        manager, state = CheckpointManager(tmp_path, ps=single), small.state(1)
        manager.prepare(state)
        for number, step in enumerate((1, 2, 3)):
            with host_reads() as found, device.lock:  # the copying thread gets no further than its wait
                handle = manager.save_async(step, state)
                manager.before_update()
            del found["core/dist_checkpointing/planning/exchange.py _as_stored"]  # the slab's own views
            assert found == {"core/dist_checkpointing/state/derive.py unequal_weights": 1}, "decides what is stored"
            assert "training" not in device.host_waits
            for tensor in small.tensors(state):
                device.current.ask(lambda t=tensor, n=number: t.data.fill_(-7 - n))
            device.current.run()
            handle.wait()
            assert device.host_waits == ["copying"] * (number + 1)
        manager.close()
    assert len(device.pinned) == 1, "the slab of the first save serves the others"
    assert digest(tmp_path / "step-00000001") == digest(tmp_path / "plain")
    copies = sum(tensor.key.startswith("optimizer/") for tensor in small.tensors(state)) + 1  # weights are derived
    order = ["side waits for current", *["side copies"] * copies, "side records", "current waits for side"]
    assert device.log == order * 3


def test_without_before_update_the_late_device_shows_it(tmp_path, single):
    """What the test above would find: an update that overtakes the copy."""
    with late_device() as device:
        manager, state = CheckpointManager(tmp_path, ps=single), values()
        device.current.ask(lambda: state["a"].add_(1))  # of the step before: copied with it
        started, real = [], WriterProgram.copy
        with pytest.MonkeyPatch.context() as patch, device.lock:  # the copying thread gets no further than its wait
            patch.setattr(WriterProgram, "copy", lambda self, cells: (started.append(1), real(self, cells))[1])
            handle = manager.save_async(1, state)
            device.current.ask(lambda: state["a"].mul_(-1))
            device.current.run()
        handle.wait()
        found = {name: torch.empty_like(tensor) for name, tensor in values().items()}
        manager.load(1, found)
        manager.close()
    assert torch.equal(found["a"], -(torch.arange(1000.0) + 1)) and torch.equal(found["b"], values()["b"])


def test_the_slab_grows_once_for_a_larger_state(tmp_path, single):
    with late_device() as device:
        manager = CheckpointManager(tmp_path, ps=single)
        for step, size in ((1, 10), (2, 100), (3, 50)):
            manager.save_async(step, {"a": torch.full((size,), float(step)), "b": torch.full((7,), -float(step))})
            found = {"a": torch.empty(size), "b": torch.empty(7)}
            assert manager.load_latest(found)[0] == step
            assert (found["a"] == step).all() and (found["b"] == -step).all()
        manager.close()
    assert device.pinned == [64 + 64, 448 + 64]


def shard(box, tensor, on_host=False):
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return ShardBits(box, bits, bits.numpy().view(np.float32) if on_host else None)


def test_parts_of_a_cell_any_strides_and_host_memory():
    whole = torch.arange(24.0).reshape(4, 6)
    upper = shard(((0, 2), (0, 6)), whole[:2].T.contiguous().T)
    lower, lower_on_host = (
        shard(((2, 4), (0, 6)), whole[2:].clone()),
        shard(((2, 4), (0, 6)), whole[2:].clone(), True),
    )
    host, half = shard(((0, 4), (0, 6)), whole.clone(), True), shard(((0, 2),), torch.tensor([1.5, 2.5]).bfloat16())
    info = ArrayInfo((4, 6), "float32")
    cells = [
        LocalCell("half", (0,), ((0, 2),), ArrayInfo((2,), "bfloat16"), [half]),
        LocalCell("two parts", (0, 0), ((1, 3), (0, 5)), info, [upper, lower]),
        LocalCell("mixed", (0, 0), ((0, 4), (0, 6)), info, [upper, lower_on_host]),
        LocalCell("host", (0, 0), ((0, 4), (2, 3)), info, [host]),
    ]
    log, found = [], {}

    def copy(owned):
        for key, _, _, array in owned:
            log.append(key)
            found[key] = np.array(array)

    with late_device() as device:
        beside = CopyBesideStep(cells, PinnedStage(torch.device("cpu")))
        beside.reserve()
        assert device.pinned == [64 + (64 + 64) + 64]
        with device.lock:
            beside.start(copy, lambda: log.append("handed over"))
            beside.before_update()
            assert log == ["host"], "before the device has done anything"
            for part in (host, lower_on_host):
                part.bits.fill_(-1)
        beside.wait()
    assert log == ["host", "half", "two parts", "mixed", "handed over"]
    assert found["half"].tobytes() == half.bits.numpy().tobytes()
    assert found["two parts"].tolist() == whole[1:3, :5].tolist()
    assert found["host"].tolist() == whole[:, 2:3].tolist()
    assert found["mixed"].tolist() == whole.tolist()


def test_bytes_of_a_slab():
    assert staged_bytes([torch.empty(3), torch.empty(0), torch.empty(17, dtype=torch.float64)]) == 64 + 192
