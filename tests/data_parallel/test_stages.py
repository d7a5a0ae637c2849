"""ZeRO stages against each other, bit for bit, and a plain loop against one process."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.optimizer.state.offload import Offload
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from tests.parity.shards import whole_weights
from tests.states import state

STEPS, ROWS = 5, 36  # 3 microbatches on 2, 3 and 4 ranks
CONFIG = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=0.5)


class Net(nn.Module):
    """Layers of odd sizes, a table used at both ends, a norm."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        facts = {"dtype": dtype}
        self.table = nn.Embedding(23, 10, **facts)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 37, **facts), nn.Tanh(), nn.Linear(37, 10, **facts)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(10, **facts)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(self.norm(x), self.table.weight)


def ids_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(23, (ROWS, 5), generator=generator)


def loss_sum(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def trained(dtype, zero, *, microbatches=1, executor=True, offload=None, **options):
    """(whole weights, losses) after STEPS steps on this rank's rows."""
    ps = state()
    model = Net(dtype)
    shard = DataParallel(model, ps, zero_stage=zero, bucket_size=500, **options)
    optimizer = ShardedAdamW(shard, CONFIG, offload=offload)
    run = SingleStage(model, ps=ps, num_microbatches=microbatches, grad_sync=shard)
    losses = []
    for step in range(STEPS):
        mine = ids_of(step).chunk(ps.size("dp"))[ps.index("dp")]
        if executor:
            result = run.step(mine, loss_sum)
            optimizer.step(num_tokens=result.num_tokens)
            losses.append(result.loss.item())
        else:
            loss, tokens = loss_sum(model(mine), mine)
            (loss / tokens).backward()
            optimizer.step()
            losses.append((loss / tokens).item())
        optimizer.zero_grad()
    return whole_weights(shard), losses


def equal_bits(cases):
    """The cases whose weights differ in any bit from the first's."""
    first, *others = [trained(torch.float32, **case) for case in cases]
    return [
        case
        for case, found in zip(cases[1:], others, strict=True)
        if found[1] != first[1] or any(not torch.equal(w, found[0][name]) for name, w in first[0].items())
    ]


HALF = Offload(kind="cpu", fraction=0.5)
SETTINGS = [{"overlap": o, "offload": f} for o, f in itertools.product((True, False), (None, HALF))]
SEVERAL = [{"zero": zero, "microbatches": 3} | setting for zero in (0, 1) for setting in SETTINGS]
ONE = [{"zero": zero} | setting for zero, setting in [(0, {}), *itertools.product((1, 2, 3), SETTINGS)]]


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))])
def test_stages_overlap_and_offload_give_the_same_bits(ranks, world):
    few = slice(None, None, 1 if world == 2 else 3)
    assert ranks(equal_bits, SEVERAL[few], world=world) == [[]] * world
    assert ranks(equal_bits, ONE[few], world=world) == [[]] * world


def against_stage_one(zero):
    (first, losses), (second, others) = (trained(torch.float64, z, microbatches=3) for z in (1, zero))
    assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=1e-12, atol=0)
    return max(((second[n] - w).abs().max() / w.abs().max()).item() for n, w in first.items())


@pytest.mark.parametrize("zero", [2, 3])
def test_sums_per_microbatch_differ_by_rounding_only(ranks, zero):
    assert max(ranks(against_stage_one, zero, world=2)) <= 1e-12


def alone(dtype):
    """What the plain loop gives in one process on the whole batch."""
    model = Net(dtype)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    losses = []
    for step in range(STEPS):
        loss, tokens = loss_sum(model(ids_of(step)), ids_of(step))
        (loss / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss / tokens).item())
    return dict(model.named_parameters()), losses


def plain(zero, **options):
    return trained(torch.float64, zero, executor=False, **options)


@pytest.mark.parametrize(
    "options", [{}, {"backward_passes": 1}, {"overlap": False}], ids=["", "passes told", "no overlap"]
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plain_loop_gives_one_processs_losses(ranks, zero, options):
    weights, losses = alone(torch.float64)
    answers = ranks(plain, zero, world=2, **options)
    mean = torch.tensor([found for _, found in answers], dtype=torch.float64).mean(0)
    assert torch.allclose(mean, torch.tensor(losses, dtype=torch.float64), rtol=1e-10, atol=0)
    for found, _ in answers:
        for name, w in weights.items():
            assert (found[name] - w).abs().max() <= 1e-10 * w.abs().max(), name


def test_one_process_alone_needs_no_group():
    model = Net(torch.float64)
    shard = DataParallel(model, ParallelState.single("cpu"), zero_stage=3)
    optimizer = ShardedAdamW(shard, CONFIG)
    weights, losses = alone(torch.float64)
    for step in range(STEPS):
        loss, tokens = loss_sum(model(ids_of(step)), ids_of(step))
        (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(loss.item() / tokens - losses[step]) <= 1e-10 * losses[step]
    for name, p in model.named_parameters():
        assert (p - weights[name]).abs().max() <= 1e-10 * weights[name].abs().max(), name
