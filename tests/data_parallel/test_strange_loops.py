"""Models and loops that nobody planned for, at every ZeRO stage: the numbers of one process, or an error."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from tests.parity.shards import whole_weights
from tests.states import state

STEPS = 2


class Net(nn.Module):
    """Three layers between what belongs to the root."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)

    def loss(self, x):
        return (self(x) - 1).pow(4).mean()

    def backward(self, x, zero):
        """One step's gradients."""
        loss = self.loss(x)
        loss.backward()
        return loss


class Accumulates(Net):
    def backward(self, x, zero):
        losses = [self.loss(part) / 2 for part in x.chunk(2)]  # two graphs at once
        losses[1].backward()
        losses[0].backward()
        return sum(losses)


class ReadsBetween(Net):
    """Gradients are read, and clipped by a number, between two backward calls."""

    def backward(self, x, zero):
        losses = [self.loss(x), self.loss(0.5 * x)]
        losses[1].backward()
        self.norm.weight.grad.norm()
        self.first.weight.grad.clamp_(-0.1, 0.1)
        self.layers[0][0].weight.grad[:3] *= 0.5
        losses[0].backward()
        return sum(losses)


class KeepsItsGraph(Net):
    def backward(self, x, zero):
        loss = self.loss(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss


class GivesUp(Net):
    """A backward that is thrown away, as one does with a loss that is not finite."""

    def backward(self, x, zero):
        self.loss(3 * x).backward()
        zero()
        return super().backward(x, zero)


class FailsInBackward(Net):
    def backward(self, x, zero):
        def fails(gradient):
            raise KeyError("a user's hook")

        handle = self.layers[1].register_forward_hook(
            lambda module, args, output: (output.register_hook(fails), None)[1]
        )
        loss = self.loss(3 * x)
        handle.remove()
        with pytest.raises(KeyError, match="a user's hook"):
            loss.backward()
        zero()
        return super().backward(x, zero)


class Branch(nn.Module):
    """A parameter that no backward reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(5, 3)

    def forward(self, x):
        return torch.tanh(self.used(x))


class Unreached(Accumulates):
    def __init__(self):
        super().__init__()
        self.layers.insert(1, Branch())


class ManyOutputs(Accumulates):
    """The root's outputs are reached at different moments of one backward."""

    def forward(self, x):
        x, kept = self.first(x), []
        for layer in self.layers:
            x = x + layer(x)
            kept.append(x)
        return {"y": self.norm(x), "kept": kept, "none": None}

    def loss(self, x):
        found = self(x)
        return (found["y"] - 1).pow(4).mean() + sum(x.square().mean() for x in found["kept"])


class RunsAgainToTheEnd(Net):
    """Recomputation that calls the layers' forward hooks, in the middle of their backward."""

    def forward(self, x):
        def two(x):
            return self.layers[1](self.layers[0](x))

        with set_checkpoint_early_stop(False):
            return self.norm(self.layers[2](checkpoint(two, self.first(x), use_reentrant=False)))


class AsksForInputs(Net):
    """A backward that ends at the input, before the real one."""

    def loss(self, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).square().sum(), x)
        return super().loss(x + slope.detach())


class NothingInIt(Net):
    """A parameter without elements, one without dims, one that lies in another order."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.scale, self.turned = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(5, 8).t())

    def forward(self, x):
        return (super().forward(x) * self.scale + self.nothing.sum()) @ self.turned


MODELS = [
    Accumulates,
    ReadsBetween,
    KeepsItsGraph,
    GivesUp,
    FailsInBackward,
    Unreached,
    ManyOutputs,
    RunsAgainToTheEnd,
    AsksForInputs,
    NothingInIt,
]


def loop(model, rows, zero, step):
    losses = []
    for number in range(STEPS):
        x = rows(torch.randn(8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64))
        losses.append(model.backward(x, zero).item())
        step()
        zero()
    return losses


def alone(make):
    torch.set_default_dtype(torch.float64)
    try:
        model = make()
    finally:
        torch.set_default_dtype(torch.float32)
    named = dict(model.named_parameters())
    plain = [p for name, p in named.items() if p.dim() < 2 or name.endswith("bias")]
    matrices = [p for name, p in named.items() if p.dim() > 1 and not name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}])

    def zero():
        for p in named.values():
            p.grad = None

    return loop(model, lambda x: x, zero, optimizer.step), named


def cut(models, zero_stage, replicate=1, **options):
    ps, found = state(replicate=replicate), []
    for make in models:
        model = make()
        shard = DataParallel(model, ps, zero_stage=zero_stage, bucket_size=60, **options)
        optimizer = ShardedAdamW(shard, OptimizerConfig(weight_decay=0.1, clip_grad=0.0))
        mine = ps.index("dp")
        losses = loop(model, lambda x, at=mine: x.chunk(ps.size("dp"))[at], optimizer.zero_grad, optimizer.step)
        found.append((losses, whole_weights(shard)))
    return found


def check(ranks, zero, models=MODELS, world=2, **options):
    answers = ranks(cut, models, zero, world=world, **options)
    for make, *found in zip(models, *answers, strict=True):
        losses, weights = alone(make)
        mean = torch.tensor([mine for mine, _ in found], dtype=torch.float64).mean(0)
        assert torch.allclose(mean, torch.tensor(losses, dtype=torch.float64), rtol=1e-10, atol=0), make.__name__
        for name, w in weights.items():
            for _, whole in found:
                assert (whole[name] - w).abs().sum() <= 1e-9 * w.abs().sum(), (make.__name__, name)


@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3]
)
def test_strange_loops_give_one_processs_numbers(ranks, zero):
    check(ranks, zero)


@pytest.mark.parametrize(
    "zero", [0, pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("options", [{"overlap": False}, {"backward_passes": 1}], ids=["no overlap", "passes told"])
def test_a_backward_may_be_thrown_away_or_added_to_sums(ranks, zero, options):
    check(ranks, zero, [GivesUp, FailsInBackward, ReadsBetween], **options)


@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)
def test_two_copies_of_two_shards(ranks, zero):
    check(ranks, zero, [Accumulates, ReadsBetween, Unreached, ManyOutputs], world=4, replicate=2)


class Opaque:
    def __init__(self, x):
        self.x = x


class HidesItsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return Opaque((x.x if isinstance(x, Opaque) else x) * self.scale.view(8))


def hidden():
    model = nn.Module()
    model.layers = nn.ModuleList(HidesItsOutput() for _ in range(2))
    shard = DataParallel(model, state(), zero_stage=3)
    x = torch.ones(2, 8, requires_grad=True)
    for layer in model.layers:
        x = layer(x)
    with pytest.raises(RuntimeError, match="at version 1073741824"):
        x.x.sum().backward()
    shard.remove()


def test_a_backward_without_weights_is_an_error_and_no_crash(ranks):
    """Nobody sees when backward reaches a layer whose output is an object of its own."""
    ranks(hidden, world=2)


def fitted(model, first, x):
    """Adam, then LBFGS whose closure begins with zero_grad: how physics-informed networks are fitted."""
    for _ in range(STEPS):
        first.zero_grad()
        model.backward(x, 0)
        first.step()
    second = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        second.zero_grad()
        return model.backward(x, 0).detach()

    for _ in range(STEPS):
        second.step(closure)


def adam_then_lbfgs(zero):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    alone = Net().double()
    fitted(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.0), x)
    model = Net().double()
    shard = DataParallel(model, state(), zero_stage=zero)
    fitted(model, ShardedAdamW(shard, OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=0.0)), x)
    shard.remove()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_lbfgs_goes_on_where_our_adam_ended(ranks, zero):
    ranks(adam_then_lbfgs, zero, world=2)
