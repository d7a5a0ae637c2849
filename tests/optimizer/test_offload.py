"""States on the host or on disk: the same bits, the same files, nothing left behind."""

from pathlib import Path

import pytest
import torch

from core.optimizer import Offload, OptimizerConfig, ShardedAdamW, ShardedSGD, build_optimizer
from core.parallel_state import ParallelState
from tests.optimizer.fake_shard import FakeShard
from tests.optimizer.test_sharded import DTYPES, Net, equal, give

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.3, clip_grad=0.5, momentum=0.5)


def trained(kind, dtype, offload, steps=3, config=CONFIG, **shard):
    model = Net(dtype, ragged=True)
    optimizer = kind(FakeShard(model, **shard), config, offload=offload)
    for step in range(steps):
        give(model, step)
        optimizer.step(num_tokens=3 if step else 0)  # the first is skipped
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_step_is_the_same_bit_for_bit(dtype, where, fraction, tmp_path, monkeypatch):
    monkeypatch.setattr("core.optimizer.state.streamed.CHUNK", 640)
    offload = Offload(kind=where, fraction=fraction, directory=tmp_path / "states")
    (model, ours), (other, resident) = trained(ShardedAdamW, dtype, offload), trained(ShardedAdamW, dtype, None)
    equal(ours, resident)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    far = sum(part.stop - part.start for part in ours._state_buffers if not part.resident)
    total = sum(part.stop - part.start for part in ours._state_buffers)
    assert far % 64 == 0 and fraction * total - 64 < far <= fraction * total
    assert not list(tmp_path.rglob("*.states")), "files have no name once they are mapped"
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert bool(maps) == (where == "disk" and fraction > 0) and all("(deleted)" in line for line in maps)


@pytest.mark.parametrize("main_params", [True, False], ids=["main", "stochastic"])
def test_also_of_sgd_and_of_weights_without_mains(main_params, tmp_path):
    config = OptimizerConfig(lr=0.1, momentum=0.5, main_params=main_params)
    offload = Offload(kind="disk", fraction=0.5, directory=tmp_path)
    found = [trained(ShardedSGD, torch.bfloat16, o, config=config) for o in (offload, None)]
    equal(found[0][1], found[1][1])
    for p, q in zip(found[0][0].parameters(), found[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


class LateStream:
    """A side stream whose copies happen as late as the events that were waited for allow."""

    def __init__(self):
        self.queue, self.copies = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def send(self, into, source):
        self.queue.append((into, source))
        self.copies += 1

    def record_event(self):
        last = self.queue[-1]

        class Event:
            def synchronize(_):
                while any(last is item for item in self.queue):
                    into, source = self.queue.pop(0)
                    into.copy_(source)

        return Event()

    def drain(self):
        while self.queue:
            into, source = self.queue.pop(0)
            into.copy_(source)


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("main_params", [True, False], ids=["main", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_beside_the_update_are_waited_for(dtype, main_params, fraction, monkeypatch):
    monkeypatch.setattr("core.optimizer.state.streamed.FAR_CHUNK", 640)
    model, other = Net(dtype, ragged=True), Net(dtype, ragged=True)
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, main_params=main_params)
    ours = ShardedAdamW(FakeShard(model), config, offload=Offload(fraction=fraction))
    resident = ShardedAdamW(FakeShard(other), config)
    streamer, late = ours._streamer, LateStream()
    streamer._remote, streamer._side_stream = True, late
    monkeypatch.setattr(streamer, "_enter_side_stream", lambda: None)
    monkeypatch.setattr(streamer, "_leave_side_stream", late.drain)
    monkeypatch.setattr(streamer, "_send", late.send)
    for step in range(3):
        for net, optimizer in ((model, ours), (other, resident)):
            give(net, step)
            optimizer.step(num_tokens=3)
            optimizer.zero_grad()
    equal(ours, resident)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert late.copies > 3 * 2 * fraction * sum(p.numel() for p in model.parameters()) // 640


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("main_params", [True, False], ids=["main", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_an_accelerator_offload_is_the_same_step(dtype, main_params, monkeypatch):
    monkeypatch.setattr("core.optimizer.state.streamed.FAR_CHUNK", 640)
    config = OptimizerConfig(lr=0.01, weight_decay=0.3, main_params=main_params, clip_grad=0.5)
    ps = ParallelState.single(torch.accelerator.current_accelerator())
    found = []
    for offload in (None, Offload(fraction=0.5)):
        model = Net(dtype, ragged=True).to(ps.device)
        optimizer = ShardedAdamW(FakeShard(model, ps=ps), config, offload=offload)
        for step in range(3):
            give(model, step)
            optimizer.step(num_tokens=3)
            optimizer.zero_grad()
        found.append(model)
    for p, q in zip(found[0].parameters(), found[1].parameters(), strict=True):
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_states_of_a_cut_parameter_go_out_and_come_back(zero_stage):
    offload = Offload(fraction=0.3)
    cut = {"zero_stage": zero_stage, "ranks": 2 if zero_stage else 1}
    _, ours = trained(ShardedAdamW, torch.bfloat16, offload, **cut)
    _, again = trained(ShardedAdamW, torch.bfloat16, Offload(fraction=0.7), steps=0, **cut)
    again.load_states(ours.states(), ours.step_count, skipped_steps=1)
    equal(again, ours)
    for optimizer in (ours, again):
        give(optimizer.shard.module, 9)
        optimizer.step(num_tokens=3)
    equal(again, ours)
    boxes = again.sharded_state_dict()["states"]["first"]["exp_avg"]
    live = {part.states["exp_avg"].untyped_storage().data_ptr() for part in again._state_buffers}
    assert {box.data.untyped_storage().data_ptr() for box in boxes} <= live and len(boxes) > 1


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_a_fraction_is_a_fraction(fraction):
    with pytest.raises(ValueError, match=rf"fraction={fraction} must be between 0 \(all beside the weights\) and 1"):
        Offload(fraction=fraction)


def test_offload_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match=r"kind='nvme' is unknown; known: cpu, disk"):
        Offload(kind="nvme")
    with pytest.raises(ValueError, match="'disk' needs a directory"):
        Offload(kind="disk")
    with pytest.raises(ValueError, match=r"offload='cpu' holds a fraction 0.5 of them on the host"):
        build_optimizer(FakeShard(Net()), OptimizerConfig(optimizer="muon"), offload=Offload(fraction=0.5))
