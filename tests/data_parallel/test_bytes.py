"""What a rank holds between steps is what its ZeRO stage promises, to the byte, whatever happened in between."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from core.data_parallel import DataParallel
from core.data_parallel.weights.freed import FreedParameter
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.pipeline import SingleStage
from tests.states import state


class Net(nn.Module):
    """Odd sizes; may fail in the middle."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        sizes, facts = (10, 37, 10), {"dtype": dtype}
        self.first = nn.Linear(10, 10, **facts)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(*sizes[:2], **facts), nn.Tanh(), nn.Linear(*sizes[1:], **facts)) for _ in range(3)
        )
        self.fails = False

    def forward(self, x):
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.fails and number == 1:
                raise KeyError("on purpose")
        return x


def square(output, x):
    return output.float().square().sum(), len(x)


def promised(shard, dtype):
    """The formulas of docs/concepts/data_parallel.md over every bucket, padding included, but no moments where a
    rank's part is all padding."""
    d, stage = shard.ps.size("shard"), shard.zero_stage
    weight, main = dtype.itemsize, 4 if dtype.itemsize < 4 else 0
    total = 0
    for buffer in shard.buffers:
        states = main + (8 if buffer.segments else 0)
        whole = weight * (stage < 3) + 4 * (stage < 2) + states * (stage < 1)
        divided = weight * (stage == 3) + 4 * (stage >= 2) + states * (stage >= 1)
        total += whole * buffer.bucket.size + divided * buffer.bucket.size // d
    return total


def held(shard, optimizer):
    """Bytes of the different storages behind weights, gradients and states, as large as they are now."""
    parameters = shard.named_parameters().values()
    tensors = [p.main_grad for p in parameters] + [p.data for p in parameters if type(p) is not FreedParameter]
    for buffer in shard.buffers:
        tensors += [buffer.weights, buffer.gradients, *buffer._full_weights, *buffer._full_gradients]
    for part in optimizer._state_buffers:
        tensors += [t for t in (part.main, *part.states.values()) if t is not None]
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(size for size in found.values() if size > 8)  # what stands for a freed tensor is one number


def reachable():
    """All tensors that Python can reach."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def alive():
    """Their bytes; symbolic ones, of other tests' compilers, have none."""
    tensors = [x for x in reachable() if type(x) is not FakeTensor]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def bytes_of(dtype, zero, *, watch=False, **sizes):
    """(held after every step, evaluation and failure; promised; how much more is alive at the end, if watched)."""
    others = reachable() if watch else []  # of earlier tests in this process: kept, so that none goes meanwhile
    ps = state(**sizes)
    model = Net(dtype)
    shard = DataParallel(model, ps, zero_stage=zero, bucket_size=500)
    optimizer = ShardedAdamW(shard, OptimizerConfig())
    run = SingleStage(model, ps=ps, num_microbatches=2, grad_sync=shard)
    x = torch.randn(4, 10, dtype=dtype)
    seen, live = [held(shard, optimizer)], 0
    for step in range(4):
        if step == 1:
            live = alive() if watch else 0
            run.evaluate(x, square)
            seen.append(held(shard, optimizer))
            model.fails = True
            with pytest.raises(KeyError, match="on purpose"):
                run.step(x, square)
            model.fails = False
            optimizer.zero_grad()
        result = run.step(x, square)
        optimizer.step(num_tokens=result.num_tokens)
        optimizer.zero_grad()
        seen.append(held(shard, optimizer))
        del result
    square(model(x), x)[0].backward()  # a plain loop, too
    optimizer.step()
    optimizer.zero_grad()
    seen.append(held(shard, optimizer))
    assert all(p.grad is None for p in model.parameters())
    growth = alive() - live if watch else 0
    del others
    return set(seen), promised(shard, dtype), growth


def even(dtype):
    found = []
    for zero in range(4):
        shard = DataParallel(nn.Linear(64, 64, bias=False, dtype=dtype), state(), zero_stage=zero)
        found.append(held(shard, ShardedAdamW(shard, OptimizerConfig())) / 64**2)
    return found


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("dtype", "world", "replicate"),
    [
        (torch.float32, 2, 1),
        (torch.bfloat16, 4, 1),
        pytest.param(torch.bfloat16, 4, 2, marks=FULL),
        pytest.param(torch.bfloat16, 2, 1, marks=FULL),
        pytest.param(torch.float32, 4, 1, marks=FULL),
        pytest.param(torch.float32, 4, 2, marks=FULL),
    ],
    ids=str,
)
def test_stages_hold_what_they_promise(ranks, dtype, world, replicate):
    for zero in range(4):
        for seen, want, _ in ranks(bytes_of, dtype, zero, world=world, replicate=replicate):
            assert seen == {want}, zero


@pytest.mark.parametrize("zero", [pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3])
def test_nothing_grows(ranks, zero):
    for *_, growth in ranks(bytes_of, torch.float32, zero, world=2, watch=True):
        assert growth == 0


@pytest.mark.parametrize(
    ("dtype", "each"), [(torch.float32, [16, 8 + 4, 4 + 6, 8]), (torch.bfloat16, [18, 6 + 6, 2 + 8, 9])], ids=str
)
def test_bytes_per_parameter_without_padding(ranks, dtype, each):
    """d = 2, sizes that need no padding: the numbers of the table themselves."""
    assert ranks(even, dtype, world=2) == [each] * 2
