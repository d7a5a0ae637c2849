"""The life cycle of gradients and weights: every event in every state is right or refused, at every ZeRO stage."""

import copy
from datetime import timedelta

import pytest
import torch
from torch import nn

from core.autograd import StageContext, linear
from core.data_parallel import DataParallel
from core.data_parallel.weights.freed import FreedParameter
from core.data_parallel.weights.table import stages_of
from core.optimizer import OptimizerConfig, ShardedAdamW, ShardedSGD
from core.parallel_state import ParallelState
from core.parallel_state.collectives.groups import world_timeout_s
from core.parallel_state.flat import Entry, bucket_table
from tests.pool import TIMEOUT_S
from tests.states import state

ZERO = [0, 1, pytest.param(2, marks=pytest.mark.full), 3]


def net(dtype=torch.float64):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(dtype)


def made(zero, dtype=torch.float64, kind=ShardedAdamW, **options):
    model = net(dtype)
    shard = DataParallel(model, state(), zero_stage=zero, bucket_size=30)
    return model, shard, kind(shard, OptimizerConfig(lr=0.1, clip_grad=0.0, **options))


def backward(model, scale=1.0):
    x = torch.ones(2, 6, dtype=model[0].weight.dtype)
    (model(x).float().square().mean() * scale).backward()


EVENTS = {
    "backward": lambda model, shard, optimizer: backward(model),
    "finish": lambda model, shard, optimizer: shard.finish(),
    "step": lambda model, shard, optimizer: optimizer.step(),
    "zero_grad": lambda model, shard, optimizer: optimizer.zero_grad(),
}
STATES = {
    "fresh": [],
    "accumulating": ["backward"],
    "summed": ["backward", "finish"],
    "stepped": ["backward", "step"],
}
# state -> event -> what it refuses with
REFUSED = {
    "summed": {"finish": "a second step or finish"},
    "stepped": {"finish": "a second step or finish", "step": "used up by step 1"},
}


def every_cell(zero):
    for place, way in STATES.items():
        for name, event in EVENTS.items():
            model, shard, optimizer = made(zero)
            for before in way:
                EVENTS[before](model, shard, optimizer)
            says = REFUSED.get(place, {}).get(name)
            if says:
                with pytest.raises((ValueError, RuntimeError), match=says):
                    event(model, shard, optimizer)
            else:
                event(model, shard, optimizer)
            optimizer.zero_grad()  # whatever came before: this is a step of one process
            shard.remove()
            twin = copy.deepcopy(model)
            shard = DataParallel(model, state(), zero_stage=zero)
            optimizer = ShardedSGD(shard, OptimizerConfig(lr=0.1, clip_grad=0.0, weight_decay=0.0, momentum=0.0))
            torchs = torch.optim.SGD(twin.parameters(), lr=0.1)
            for net_, opt in ((model, optimizer), (twin, torchs)):
                backward(net_)
                opt.step()
            shard.remove()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert (p - q).abs().max() < 1e-12, (place, name)


@pytest.mark.parametrize("zero", ZERO)
def test_every_event_in_every_state(ranks, zero):
    ranks(every_cell, zero, world=2)


def sixteen_bits(zero):
    model, shard, optimizer = made(zero, torch.bfloat16, weight_decay=0.0)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    sevens = {name: torch.full_like(p, 7.0) for name, p in net(torch.bfloat16).state_dict().items()}
    model.load_state_dict(sevens)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    backward(model)
    optimizer.step()
    for part in optimizer._state_buffers:
        assert all((part.main[slice(*shard.span)] == 7).all() for shard in part.parameter_shards)
    shard.remove()
    assert all((p == 7).all() for p in model.parameters())


@pytest.mark.parametrize("zero", ZERO)
def test_16_bit_weights_that_are_loaded_after_the_wrap_are_the_main_copies(ranks, zero):
    ranks(sixteen_bits, zero, world=2)


def halves(zero, scaled):
    model, shard, optimizer = made(zero, torch.float16, ShardedSGD, momentum=0.0, weight_decay=0.0)
    before = net(torch.float16)
    backward(model, optimizer.loss_scale.float() if scaled else 1.0)
    norm = optimizer.step().grad_norm
    scale = optimizer._scaler.value.item()
    shard.remove()
    backward(before)
    want = torch.stack([p.grad.float().norm() for p in before.parameters()]).norm()
    assert norm == pytest.approx(want.item(), rel=1e-2) and scale == 2.0**16
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(p.float(), (q - 0.1 * q.grad).float(), atol=2e-3)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("zero", ZERO)
def test_float16_in_a_plain_loop(ranks, zero, scaled):
    """Nobody multiplied the loss, so nothing is divided; who asks for the scale has multiplied."""
    ranks(halves, zero, scaled, world=2)


def kept(zero):
    model, shard, optimizer = made(zero)
    before = [p.clone() for p in net().parameters()]
    shard.unshard(model)
    for p in model.parameters():
        p.data.mul_(0.5)
    shard.reshard(model)
    assert zero < 3 or all(type(p) is FreedParameter for p in model.parameters())
    optimizer.step()  # no gradient
    shard.remove()
    assert all(torch.equal(p, 0.5 * q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("zero", ZERO)
def test_what_is_written_between_unshard_and_reshard_is_kept(ranks, zero):
    ranks(kept, zero, world=2)


def written_by_one(zero):
    """DeepSpeed's modifier_rank=0 sends what one rank writes; here every rank writes."""
    model, shard, _ = made(zero)
    shard.unshard(model)
    if shard.ps.rank == 0:
        with torch.no_grad():
            next(model.parameters()).fill_(0.25)
    with pytest.raises(ValueError, match="written by hand with other values"):
        shard.reshard(model)


@pytest.mark.parametrize("zero", ZERO)
def test_what_one_rank_writes_between_unshard_and_reshard_is_refused(ranks, zero):
    ranks(written_by_one, zero, world=2)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return x + self.f(x)


def test_blocks_in_a_sequential_are_units():
    body = nn.Sequential(*[Residual() for _ in range(3)])
    assert list(stages_of(body, "layer")[0].units) == ["0", "1", "2"]
    stages = nn.Sequential(nn.Linear(4, 4), body, nn.Sequential(Residual(), Residual()), nn.Linear(4, 2))
    assert list(stages_of(stages, "layer")[0].units) == ["1.0", "1.1", "1.2", "2.0", "2.1"]
    assert not stages_of(net(), "layer")[0].units, "layers without modules of their own are too small"
    lists = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(Residual(), Residual())])})
    assert list(stages_of(lists, "layer")[0].units) == ["layers.0"]


def test_a_bucket_of_many_parameters_is_linear(monkeypatch):
    entries = [Entry(f"experts.{i}", 100, "layers.0") for i in range(32_000)]
    (bucket,) = bucket_table(entries, {"dp-cp": 2}, 2**23)
    assert len(bucket.slots) == 32_000 and bucket.size == 3_200_000


def the_users_timeout():
    return world_timeout_s(), ParallelState.build(device="cpu").world.timeout


def test_the_timeout_of_init_process_group_stands(ranks):
    for told, ours in ranks(the_users_timeout, world=2):
        assert ours == timedelta(seconds=told) == timedelta(seconds=TIMEOUT_S / 2), "the pool's own"


def test_complex_parameters_are_told_when_the_optimizer_is_made():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    shard = DataParallel(model, ParallelState.single("cpu"))
    with pytest.raises(ValueError, match="is complex64, which none of the fused updates knows; hold it as"):
        ShardedAdamW(shard, OptimizerConfig())


def test_a_run_of_which_no_step_is_good_ends():
    model = net(torch.float32)
    shard = DataParallel(model, ParallelState.single("cpu"))
    optimizer = ShardedAdamW(shard, OptimizerConfig())
    with pytest.raises(RuntimeError, match=r"step 100: 100 steps in a row were skipped, max_skipped_steps=0"):
        for _ in range(101):
            backward(model, float("nan"))
            optimizer.step()
            optimizer.zero_grad()


def test_another_ranks_states_are_refused():
    model = net()
    optimizer = ShardedAdamW(DataParallel(model, ParallelState.single("cpu")), OptimizerConfig())
    held = optimizer.state_dict()
    name, kinds = next(iter(held["states"].items()))
    kinds["exp_avg"] = (kinds["exp_avg"][0][:5], (0, 5))
    with pytest.raises(ValueError, match=rf"exp_avg of {name} holds elements \(0, 5\), this rank holds"):
        optimizer.load_state_dict(held)
    with pytest.raises(TypeError, match="use state_dict"):
        copy.deepcopy(optimizer)


def test_compiled_linears_are_told_when_main_grad_comes_and_goes():
    module, x = nn.Linear(4, 3, bias=False), torch.randn(5, 4)
    linear.make_compilable(module.weight)
    assert not module.weight._deferral.has_owner
    shard = DataParallel(module, ParallelState.single("cpu"))
    assert module.weight._deferral.has_owner
    shard.remove()
    y = linear._compiled_linear(x, module.weight, None, StageContext())
    (found,) = torch.autograd.grad(y.sum(), module.weight)
    torch.testing.assert_close(found, x.sum(0).expand(3, 4))
