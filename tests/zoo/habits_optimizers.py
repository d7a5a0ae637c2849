"""Habits with optimizers: groups, schedulers, closures, hooks, states."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW
from tests.states import state
from tests.zoo.habit_side import DECAY, RATE, READS, Net, Side, habits, loss_of, steps

HABITS, habit = habits()


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


@habit(
    "a rate from one rank's own loss",
    "options in param_groups .* of rank 1 are not those of rank 0",
    "the loss of all ranks",
    outcome="refused",
)
def own_rate(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    scheduler = _S.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(4):
        steps(side, model, optimizer, 1, step)
        scheduler.step(step if side.ours and dist.get_rank() else -step)
    return side.weights(optimizer, model)


@habit(
    "param_groups[0]['weight_decay'] set by hand, where biases are spared",
    r"weight_decay'\] was changed to 0.3; its biases and norms keep 0",
    "`OptimizerConfig.weight_decay_of='all'`",
    outcome="told",
)
def decay_by_hand(side: Side) -> dict[str, Tensor]:
    model = side.net()
    if side.ours:
        shard = DataParallel(model, state(), zero_stage=side.zero, bucket_size=40)
        optimizer: Any = ShardedAdamW(shard, OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=0.0))
    else:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit("decay of everything, as torch's: OptimizerConfig(weight_decay_of='all')")
def decay_of_all(side: Side) -> dict[str, Tensor]:
    model = side.net()
    if side.ours:
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, weight_decay_of="all", clip_grad=0.0)
        optimizer: Any = ShardedAdamW(DataParallel(model, state(), zero_stage=side.zero, bucket_size=40), config)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    steps(side, model, optimizer)
    return side.weights(optimizer, model)


@habit(
    "optimizer.state[p].clear(): one parameter's states anew",
    "entries that lie in buckets: none can be put in or taken out",
    "zero its tensors",
    outcome="refused",
)
def one_cleared(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    steps(side, model, optimizer, 1)
    next(iter(optimizer.state.values())).clear()
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


@habit("groups of all parameters: LambdaLR with a function for each, param_groups[0] and [1] by hand")
def groups_in_order(side: Side) -> dict[str, Tensor]:
    model = side.net()
    told = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.2, "weight_decay": 0.0},
    ]
    if side.ours:
        shard = DataParallel(model, state(), zero_stage=side.zero, bucket_size=40)
        config = OptimizerConfig(lr=RATE, weight_decay=DECAY, weight_decay_of="all", clip_grad=0.0)
        optimizer: Any = ShardedAdamW(shard, config, groups=told)
    else:
        optimizer = torch.optim.AdamW(told, lr=RATE, weight_decay=DECAY)
    matrices, vectors = optimizer.param_groups
    scheduler = _S.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.5**step])
    for step in range(3):
        steps(side, model, optimizer, 1, step)
        scheduler.step()
    matrices["weight_decay"] = 0.3
    vectors["lr"] = 0.05
    steps(side, model, optimizer, 1, 3)
    return side.weights(optimizer, model)


@habit(
    "torch.optim.SparseAdam over nn.Embedding(sparse=True)",
    "takes sparse gradients, and under DataParallel all are dense",
    "torch.optim.AdamW, Adam",
    outcome="refused",
)
def sparse(side: Side) -> dict[str, Tensor]:
    model = side.net(lambda: torch.nn.Sequential(torch.nn.Embedding(8, 6, sparse=True), torch.nn.Linear(6, 2)))
    wrapped = side.wrap(model)
    optimizer = torch.optim.SparseAdam(model[0].parameters(), lr=RATE)
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    return side.weights(wrapped, model)


@habit("torch.optim.SGD itself, from its first step")
def torchs_sgd(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model)


def play_dcgan(side: Side, generator: Any, judge: Any, of_g: Any, of_d: Any) -> None:
    """DCGAN's loop."""
    for step in range(3):
        z = side.x(step)
        judge.zero_grad()
        (judge(side.x(step + 50)) - 1).square().mean().backward()
        fake = generator(z)
        judge(fake.detach()).square().mean().backward()
        of_d.step()
        generator.zero_grad()
        (judge(fake) - 1).square().mean().backward()
        of_g.step()


@habit("a GAN with torch.optim.AdamW as DCGAN does it: backward of D twice, its step, then G's loss through D")
def dcgan(side: Side) -> dict[str, Tensor]:
    generator, judge = side.net(seed=1), side.net(lambda: Net(1), seed=2)
    of_g, of_d = side.wrap(generator), side.wrap(judge)
    step_g, step_d = (torch.optim.AdamW(net.parameters(), lr=RATE) for net in (generator, judge))
    play_dcgan(side, generator, judge, step_g, step_d)
    found = {f"g.{name}": t for name, t in side.weights(of_g, generator).items()}
    return found | {f"d.{name}": t for name, t in side.weights(of_d, judge).items()}


def late_backward(side: Side, counts: bool) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_of(model, side.x(0)).backward()
    for step in range(1, 4):
        optimizer.step()
        if counts:
            loss_of(model, side.x(step)).backward()
        else:
            x = side.x(step).requires_grad_()
            loss_of(model, x).backward()
            optimizer.zero_grad()
            loss_of(model, x + 0.1 * x.grad.sign()).backward()
    return side.weights(wrapped, model)


@habit("torch.optim.SGD: a backward for a saliency map between step() and zero_grad()")
def dropped(side: Side) -> dict[str, Tensor]:
    return late_backward(side, counts=False)


@habit("torch.optim.SGD: a backward after step() without zero_grad(), then a step")
def summed_with_used(side: Side) -> dict[str, Tensor]:
    return late_backward(side, counts=True)


@habit(
    "torch.distributed.optim.ZeroRedundancyOptimizer, as in llm.c: each rank updates its parameters",
    z3=("told", READS),
)
def zero_redundancy(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    with warnings.catch_warnings():
        # its package compiles functions by torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    of_all = ZeroRedundancyOptimizer if side.ours else partial(_made_by, torch.optim.AdamW)
    optimizer = of_all(model.parameters(), optimizer_class=torch.optim.AdamW, lr=RATE)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(wrapped, model)


def _made_by(kind: Any, parameters: Any, optimizer_class: Any, **options: Any) -> Any:
    return kind(parameters, **options)


class SharedMomentum(torch.optim.Optimizer):
    """Rank i reads the gradients of matrices i, i + world ... alone, and all add up what came of them."""

    def __init__(self, parameters: Any, ranks: range) -> None:
        super().__init__(parameters, {})
        self.ranks = ranks

    @torch.no_grad()
    def step(self) -> None:
        parameters = self.param_groups[0]["params"]
        updates = [torch.zeros_like(p) for p in parameters]
        for place, p in enumerate(parameters):
            if place % self.ranks.stop == self.ranks.start:
                kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                updates[place] += kept.mul_(0.9).add_(p.grad)
        flat = torch.cat([update.flatten() for update in updates])
        if self.ranks.stop > 1:
            dist.all_reduce(flat)
        for p, update in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.add_(update.view_as(p), alpha=-RATE)


@habit("an optimizer of one's own whose ranks read their own matrices' gradients alone (distributed Muon)")
def shared_momentum(side: Side) -> dict[str, Tensor]:
    model = side.net()
    wrapped = side.wrap(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    ranks = range(dist.get_rank(), dist.get_world_size()) if side.ours else range(0, 1)
    # of all parameters, or those that nobody steps would be told
    optimizer = SharedMomentum(matrices[:-1], ranks)
    rest = torch.optim.SGD([matrices[-1], *(p for p in model.parameters() if p.dim() == 1)], lr=RATE)
    for step in range(3):
        loss_of(model, side.x(step)).backward()
        optimizer.step()
        rest.step()
        model.zero_grad()
    return side.weights(wrapped, model)


@habit(
    "loss.backward(create_graph=True), with p.grad as it comes",
    "without its graph, so p.grad has no derivative",
    "`torch.autograd.grad(..., create_graph=True)`",
    outcome="told",
)
def with_graph(side: Side) -> dict[str, Tensor]:
    model = side.net()
    optimizer = side.wrap(model)
    for step in range(3):
        loss = loss_of(model, side.x(step))
        with warnings.catch_warnings():
            # torch's own, of a cycle
            warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
            loss.backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return side.weights(optimizer, model)
