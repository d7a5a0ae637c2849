"""What loops do to a model, its weights, its gradients and its optimizer, under DataParallel and a sharded AdamW.

The same code runs for torch and for ours: `Side` is who trains. Two ranks take half of the rows each; one torch process
takes all of them.
"""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW, ShardedSGD
from tests.states import state
from tests.zoo.case import TOLERANCE, Case, Family, Pairs, worst

RATE, DECAY = 0.05, 0.1
READS = "read outside of its module's forward"


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks between what belongs to the root."""

    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def compute_loss(self, x: Tensor) -> Tensor:
        return (F.linear(torch.tanh(F.linear(x, self.first.weight)), self.last.weight) - 1).square().mean()


@dataclass
class Side:
    """Who trains: `ours` over this rank's rows, or torch alone over all of them."""

    ours: bool
    zero: int

    def net(self, make: Callable[[], nn.Module] = Net, seed: int = 3) -> nn.Module:
        torch.manual_seed(seed)
        return make().double()

    def wrap(self, model: nn.Module, kind: str = "adamw", **options: Any) -> Any:
        """An optimizer over a model; torch's own decays every parameter."""
        parameters = [p for p in model.parameters()]
        if not self.ours:
            if kind == "sgd":
                return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=DECAY)
            return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
        shard = DataParallel(model, state(), zero_stage=self.zero, bucket_size=40, **options)
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.0, optimizer=kind)
        return (ShardedSGD if kind == "sgd" else ShardedAdamW)(shard, config, decays=lambda name, layout: True)

    def rows(self, x: Tensor) -> Tensor:
        """This rank's."""
        return x.chunk(dist.get_world_size())[dist.get_rank()] if self.ours else x

    def x(self, step: int, columns: int = 6) -> Tensor:
        return self.rows(torch.randn(8, columns, generator=torch.Generator().manual_seed(step)).double())

    def weights(self, optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
        """Whole values of everything; the end of training."""
        if self.ours:
            optimizer.shard.remove()
        return {name: t.detach().clone() for name, t in model.state_dict().items()}

    def mean(self, value: Tensor) -> Tensor:
        """Over the ranks."""
        value = value.detach().clone()
        if self.ours:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def steps(side: Side, model: Any, optimizer: Any, count: int = 3, first: int = 0) -> None:
    """The plain loop."""
    for step in range(first, first + count):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


HABITS: list[Case] = []


def habit(what: str, says: str = "", remedy: str = "", **elsewhere: Any) -> Callable:
    """Add a case: what a side computes, on both sides. elsewhere: z3=("told", ...) for one stage."""
    outcome = elsewhere.pop("outcome", "right")

    def added(run: Callable[[Side], dict[str, Tensor]]) -> Callable:
        def both(zero: int) -> Pairs:
            torch.manual_seed(0)
            got = run(Side(True, zero))
            torch.manual_seed(0)
            want = run(Side(False, zero))
            assert got.keys() == want.keys()
            pairs = {name: (got[name], want[name]) for name in got}
            assert worst(pairs)[0] <= TOLERANCE, f"wrong, told or not: {worst(pairs)}"
            return pairs

        places = {int(key[1:]): value for key, value in elsewhere.items()}
        HABITS.append(Case(what, both, outcome, says=says, remedy=remedy, elsewhere=places))
        return run

    return added


TOLD3 = {"z3": ("told", READS)}


@habit("loss.backward(); optimizer.step(); optimizer.zero_grad()")
def plain(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("optimizer.zero_grad() first in the loop")
def zero_first(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, side.x(step)).backward()
        optimizer.step()
    return side.weights(optimizer, model)


@habit("optimizer.zero_grad(set_to_none=True)")
def to_none(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return side.weights(optimizer, model)


@habit("zero_grad(set_to_none=False), then a layer that is frozen: its zeros are a gradient, as in torch")
def to_zeros(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(4):
        model.layers[0].requires_grad_(step < 2)
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return side.weights(optimizer, model)


@habit("gradient accumulation over three backward calls")
def accumulation(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(6):
        (loss_of(model, side.x(step)) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("two forwards, then two backwards")
def two_graphs(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        a, b = loss_of(model, side.x(step)), loss_of(model, side.x(step + 9))
        a.backward()
        b.backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("backward(retain_graph=True), then backward again")
def retained(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        loss = loss_of(model, side.x(step))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("a backward after step() and before zero_grad(): FGSM, the gradient by the input of the next batch")
def fgsm(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        x = side.x(step).requires_grad_()
        loss_of(model, x).backward()
        optimizer.zero_grad()
        loss_of(model, (x + 0.1 * x.grad.sign()).detach()).backward()
        optimizer.step()
    return side.weights(optimizer, model)


@habit("a saliency map between step() and zero_grad()")
def saliency(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        x = side.x(step).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        optimizer.zero_grad()
    return side.weights(optimizer, model)


def gan(side: Side, freezes: bool) -> dict[str, Tensor]:
    generator, judge = side.net(seed=1), side.net(lambda: Net(1), seed=2)
    of_g, of_d = side.wrap(generator), side.wrap(judge)
    for step in range(3):
        z, real = side.x(step), side.x(step + 50)
        of_g.zero_grad()
        if freezes:
            judge.requires_grad_(False)
        (judge(generator(z)) - 1).square().mean().backward()
        of_g.step()
        judge.requires_grad_(True)
        of_d.zero_grad()
        ((judge(real) - 1).square().mean() + judge(generator(z).detach()).square().mean()).backward()
        of_d.step()
    found = {f"g.{name}": t for name, t in side.weights(of_g, generator).items()}
    return found | {f"d.{name}": t for name, t in side.weights(of_d, judge).items()}


@habit("a GAN in torch's usual order, two networks and two optimizers")
def usual_gan(side: Side) -> dict[str, Tensor]:
    return gan(side, freezes=False)


@habit("a GAN that sets requires_grad_(False) on the discriminator while the generator learns")
def freezing_gan(side: Side) -> dict[str, Tensor]:
    return gan(side, freezes=True)


@habit("a gradient penalty: autograd.grad(create_graph=True) in the loss")
def penalty(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        x = side.x(step).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        ((y - 1).square().mean() + slope.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("a layer that is frozen after the wrap stays as it is")
def freeze(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(5):
        model.first.requires_grad_(step < 2)
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("gradual unfreezing of layers that were trainable when wrapped: each begins with its own count of updates")
def gradual(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(6):
        model.first.requires_grad_(step >= 4)
        model.layers[0].requires_grad_(step >= 2)
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit(
    "a layer that was frozen when wrapped and is unfrozen later",
    "summed by nobody",
    "freeze after the wrap, or remove() and wrap again",
    outcome="refused",
)
def unfreeze(side: Side) -> dict[str, Tensor]:
    model = side.net()
    model.first.requires_grad_(False)
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 1)
    model.first.requires_grad_(True)
    steps(side, model, optimizer, 1, 1)
    return side.weights(optimizer, model)


class LoRA(nn.Module):
    """A frozen layer and its low-rank change."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@habit("LoRA put in before the wrap")
def lora(side: Side) -> dict[str, Tensor]:
    model = side.net().requires_grad_(False)
    for layer in model.layers:
        layer.up = LoRA(layer.up)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("LoRA put in after the wrap", "summed by nobody", "put it in first, then wrap", outcome="refused")
def late_lora(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    model.layers[0].up = LoRA(model.layers[0].up)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("optimizer.step() without any backward")
def no_backward(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    optimizer.step()
    optimizer.zero_grad()
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("optimizer.step() twice without zero_grad()", "call zero_grad", "zero_grad() after each", outcome="refused")
def twice(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    loss_of(model, side.x(0)).backward()
    optimizer.step()
    optimizer.step()
    return side.weights(optimizer, model)


class Unused(Net):
    """With a branch that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 6)


@habit("parameters that no backward reaches (find_unused_parameters)")
def unused(side: Side) -> dict[str, Tensor]:
    model = side.net(Unused)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


class Skips(Net):
    """Leaves a layer out, as LayerDrop does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.first(x))
        return self.last(self.layers[1](x) if self.both else x)


@habit("a layer that is left out in every other step (LayerDrop, alike on all ranks)")
def layer_drop(side: Side) -> dict[str, Tensor]:
    model = side.net(Skips)
    optimizer = side.wrap(model)
    for step in range(4):
        model.both = step % 2 == 0
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("model.state_dict() in the middle", **TOLD3)
def state_dict(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    taken = {f"taken.{name}": t.clone() for name, t in model.state_dict().items()}
    steps(side, model, optimizer, 1, 2)
    return taken | side.weights(optimizer, model)


@habit("torch.save(model.state_dict()) and torch.load", **TOLD3)
def saved(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return {f"file.{n}": t for n, t in torch.load(file).items()} | side.weights(optimizer, model)


@habit("model.load_state_dict() after the wrap", **TOLD3)
def loaded(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    model.load_state_dict(side.net(seed=8).state_dict())
    steps(side, model, optimizer, 2, 2)
    return side.weights(optimizer, model)


@habit(
    "model.load_state_dict(assign=True) after the wrap",
    "summed by nobody",
    "load without assign, or before the wrap",
    outcome="refused",
)
def assigned(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    model.load_state_dict(side.net(seed=8).state_dict(), assign=True)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("optimizer.state_dict() and load_state_dict() into a new optimizer of the same run")
def optimizer_state(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 2)
    held, values = copy.deepcopy(optimizer.state_dict()), side.weights(optimizer, model)
    model.load_state_dict(values)
    again = side.wrap(model)
    again.load_state_dict(held)
    steps(side, model, again, 2, 2)
    return side.weights(again, model)


@habit("EMA: a deep copy of the model, updated from its parameters", **TOLD3)
def ema(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    average = copy.deepcopy(model).requires_grad_(False)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    found = {f"ema.{name}": t.clone() for name, t in average.state_dict().items()}
    return found | {"out": side.mean(average(side.x(0)).mean())} | side.weights(optimizer, model)


@habit("torch.optim.swa_utils.AveragedModel", **TOLD3)
def swa(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        average.update_parameters(model)
    return {f"ema.{n}": t.clone() for n, t in average.state_dict().items()} | side.weights(optimizer, model)


@habit("weights written in place under no_grad (averaging, clipping, constraints)", **TOLD3)
def written(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
    return side.weights(optimizer, model)


@habit("p.data.mul_(...): weight decay by hand", **TOLD3)
def decay_by_hand(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        for p in model.parameters():
            p.data.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("p.data = new values", **TOLD3)
def replaced(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        model.last.weight.data = model.last.weight.data * 0.5
        model.layers[1].up.bias.data = torch.ones(9, dtype=torch.float64)
    return side.weights(optimizer, model)


@habit("model.apply(init) after the wrap", **TOLD3)
def initialised(side: Side) -> dict[str, Tensor]:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)

    model = side.net()
    optimizer = side.wrap(model)
    model.apply(init)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("parameters_to_vector and vector_to_parameters", **TOLD3)
def as_vector(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        steps(side, model, optimizer, 1, step)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    return side.weights(optimizer, model)


@habit("weight constraints in forward: self.weight.data.clamp_()")
def constrained(side: Side) -> dict[str, Tensor]:
    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.data.clamp_(-0.2, 0.2)
            return super().forward(x)

    model = side.net()
    model.layers = nn.ModuleList(Clamps().double() for _ in range(2))
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("an L2 penalty over model.parameters() in the loss", **TOLD3)
def regularised(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        (loss_of(model, side.x(step)) + sum(p.square().sum() for p in model.parameters()) * 0.01).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("model.compute_loss(x): a method that is not forward and reads weights", **TOLD3)
def method(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        model.compute_loss(side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("submodules called one by one", **TOLD3)
def submodules(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        x = model.layers[1](model.layers[0](model.first(side.x(step))))
        model.last(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("another layer's weight read in forward")
def borrowed(side: Side) -> dict[str, Tensor]:
    class Borrows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.first.weight)

    model = side.net(Borrows)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("a layer that reads the weight of another one", **TOLD3)
def borrowed_from_a_layer(side: Side) -> dict[str, Tensor]:
    class Borrows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.layers[0].down.weight @ self.layers[0].up.weight)

    model = side.net(Borrows)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


def scheduled(side: Side, make: Callable[[Any], Any], kind: str = "adamw", metric: bool = False) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model, kind)
    scheduler = make(optimizer)
    rates = []
    for step in range(6):
        steps(side, model, optimizer, 1, step)
        scheduler.step(1.0) if metric else scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return side.weights(optimizer, model) | {"rates": torch.tensor(rates)}


_S = torch.optim.lr_scheduler
for _name, _make, _kind in (
    ("LambdaLR", lambda o: _S.LambdaLR(o, lambda step: 0.5**step), "adamw"),
    ("OneCycleLR, which moves betas too", lambda o: _S.OneCycleLR(o, max_lr=0.1, total_steps=10), "adamw"),
    ("OneCycleLR with SGD's momentum", lambda o: _S.OneCycleLR(o, max_lr=0.1, total_steps=10), "sgd"),
    ("CosineAnnealingLR", lambda o: _S.CosineAnnealingLR(o, 5), "adamw"),
    ("ExponentialLR", lambda o: _S.ExponentialLR(o, 0.7), "sgd"),
    ("CyclicLR", lambda o: _S.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False), "adamw"),
    (
        "SequentialLR",
        lambda o: _S.SequentialLR(o, [_S.LinearLR(o, 0.1, total_iters=2), _S.StepLR(o, 2, 0.5)], [2]),
        "adamw",
    ),
    ("ChainedScheduler", lambda o: _S.ChainedScheduler([_S.ConstantLR(o), _S.ExponentialLR(o, 0.9)]), "adamw"),
):
    habit(f"torch.optim.lr_scheduler.{_name}")(lambda side, make=_make, kind=_kind: scheduled(side, make, kind))


@habit("torch.optim.lr_scheduler.ReduceLROnPlateau")
def plateau(side: Side) -> dict[str, Tensor]:
    return scheduled(side, lambda o: _S.ReduceLROnPlateau(o, patience=1), metric=True)


@habit("param_groups[0]['lr'] and ['weight_decay'] set by hand")
def by_hand(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
            group["weight_decay"] = 0.01 * step
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("optimizer.step(closure)")
def closure(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, losses = side.wrap(model), []
    for step in range(3):

        def again(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, side.x(step))
            loss.backward()
            return loss

        losses.append(side.mean(optimizer.step(again)))
    return side.weights(optimizer, model) | {"losses": torch.stack(losses)}


@habit("register_step_pre_hook and register_step_post_hook")
def step_hooks(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, seen = side.wrap(model), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1.0))
    optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=0.02))
    steps(side, model, optimizer)
    return side.weights(optimizer, model) | {"seen": torch.tensor(seen)}


@habit(
    "optimizer.add_param_group",
    "add_param_group: .* give groups=",
    "groups=[{'params': ...}] at construction",
    outcome="refused",
)
def added_group(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    optimizer.add_param_group({"params": list(model.first.parameters())})
    return side.weights(optimizer, model)


@habit("groups with a rate and a decay of their own")
def groups(side: Side) -> dict[str, Tensor]:
    model = side.net()
    head = list(model.last.parameters())
    if side.ours:
        shard = DataParallel(model, state(), zero_stage=side.zero, bucket_size=40)
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.0)
        told = [{"params": head, "lr": 0.2, "weight_decay": 0.0}]
        optimizer: Any = ShardedAdamW(shard, config, groups=told, decays=lambda name, layout: True)
    else:
        rest = [p for p in model.parameters() if all(p is not q for q in head)]
        told = [{"params": rest}, {"params": head, "lr": 0.2, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(told, lr=RATE, weight_decay=DECAY)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("the user's hooks on tensors, parameters and modules")
def hooks(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    model.layers[1].register_full_backward_hook(lambda module, into, outof: (into[0] * 0.5,))
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("torch.utils.checkpoint in the model")
def checkpointed(side: Side) -> dict[str, Tensor]:
    from torch.utils.checkpoint import checkpoint

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.last(x)

    model = side.net(Again)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("torch.utils.checkpoint(use_reentrant=True)")
def reentrant(side: Side) -> dict[str, Tensor]:
    from torch.utils.checkpoint import checkpoint

    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.last(x)

    model = side.net(Again)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("torch.compile(model, backend='eager')")
def compiled(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, torch.compile(model, backend="eager"), optimizer)
    torch._dynamo.reset()
    return side.weights(optimizer, model)


@habit("torch.func.functional_call with the model's own parameters", **TOLD3)
def functional(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        scaled = {name: p * 0.9 for name, p in model.named_parameters()}
        (torch.func.functional_call(model, scaled, (side.x(step),)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("nn.utils.parametrizations.weight_norm put in before the wrap")
def parametrized(side: Side) -> dict[str, Tensor]:
    model = side.net()
    nn.utils.parametrizations.weight_norm(model.layers[0].up)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("sparse embeddings")
def sparse(side: Side) -> dict[str, Tensor]:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(12, 6, sparse=side.ours), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    model = side.net(Words)
    optimizer = side.wrap(model)
    for step in range(3):
        ids = side.rows(torch.randint(12, (8, 3), generator=torch.Generator().manual_seed(step)))
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("tied weights")
def tied(side: Side) -> dict[str, Tensor]:
    model = side.net()
    model.last.weight = model.first.weight
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("eval(), no_grad and inference_mode between steps")
def evaluated(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer, seen = side.wrap(model), []
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        model.eval()
        with torch.no_grad():
            seen.append(side.mean(loss_of(model, side.x(99))))
        with torch.inference_mode():
            loss_of(model, side.x(99))
        model.train()
    return side.weights(optimizer, model) | {"seen": torch.stack(seen)}


@habit("an exception in forward, then zero_grad() and on")
def exception(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        handle = model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        try:
            loss_of(model, side.x(step))
        except ZeroDivisionError:
            optimizer.zero_grad()
        handle.remove()
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("a loss that is thrown away after its backward (NaN guards)")
def thrown_away(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        (loss_of(model, side.x(step)) * 9).backward()
        optimizer.zero_grad()
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("autograd.grad for the weights, which leaves .grad alone", **TOLD3)
def grads_asked_for(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(2):
        found = torch.autograd.grad(loss_of(model, side.x(step)), list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), found, strict=True):
                p.sub_(side.mean(gradient), alpha=0.1)
        steps(side, model, optimizer, 1, step)
    return side.weights(optimizer, model)


@habit("Hugging Face's gradient clipping by the optimizer's own clip_grad")
def clipped(side: Side) -> dict[str, Tensor]:
    model = side.net()
    if side.ours:
        shard = DataParallel(model, state(), zero_stage=side.zero, bucket_size=40)
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.3)
        optimizer: Any = ShardedAdamW(shard, config, decays=lambda name, layout: True)
    else:
        optimizer = side.wrap(model)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        if not side.ours:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)


@habit("remove() and wrap again")
def wrapped_again(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model, "sgd")
    steps(side, model, optimizer)
    side.weights(optimizer, model)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("uneven layers: units of one parameter")
def many_units(side: Side) -> dict[str, Tensor]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), *[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)])

    model = side.net(make)
    optimizer = side.wrap(model)
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


class Codebook(nn.Module):
    """Reads and writes a buffer in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x) + self.mean * self.table
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


def as_ddp(side: Side, make: Callable[[], nn.Module], accumulate: int = 1) -> dict[str, Tensor]:
    """The reference of buffers is DDP over the same two ranks."""
    model = side.net(make)
    rows = Side(True, side.zero)
    if side.ours:
        optimizer, called = side.wrap(model, "sgd"), model
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY)
        called = nn.parallel.DistributedDataParallel(model)
    for step in range(4):
        for part in range(accumulate):
            loss_of(called, rows.x(10 * step + part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if side.ours:
        found = side.weights(optimizer, model)
    else:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # DDP does before its next forward
        found = {name: t.detach().clone() for name, t in model.state_dict().items()}
    model.eval()
    return found | {"evaluated": model(torch.ones(1, 6).double()).detach()}


@habit("BatchNorm: every rank evaluates the first rank's statistics (compared with DDP)")
def batch_norm(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)))


@habit("a buffer that forward reads and writes (compared with DDP)")
def codebook(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, Codebook)


@habit("a buffer that forward reads and writes, two backward calls per step (compared with DDP)")
def accumulated_codebook(side: Side) -> dict[str, Tensor]:
    return as_ddp(side, Codebook, 2)


FAMILY = Family(
    "Habits of training loops",
    "At ZeRO stages 0 to 3 over two ranks (the numbers after a semicolon are stages), with `DataParallel` and "
    "`ShardedAdamW` or `ShardedSGD`; compared with torch.optim in one process on all rows.",
    HABITS,
    variations=(0, 1, 2, 3),
)
