"""Hooks on gradients inside a backward, and collectives on gradients by hand, wherever the gradients lie."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from core.data_parallel import DataParallel
from tests.zoo.case import Case
from tests.zoo.split_model import only_split, sgd, train, weights

NORM = "`core.optimizer.get_grad_norm`"
GROUP = "`group=get_data_parallel_group()`"
PUT_TOGETHER = "puts together different parts"


def after_accumulation(change):
    def program(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(change)
        train(model)

    return weights(program, style="llama")


def normalized(p):
    p.grad.div_(p.grad.norm() + 1e-8)


def limited(p):
    p.grad.clamp_(-1e-2, 1e-2)


def clipped(p):
    torch.nn.utils.clip_grad_norm_([p], 1e-2)


def stepped(p):
    """An optimizer in backward with a limit for each tensor."""
    with torch.no_grad():
        p -= 0.05 * p.grad * (1e-2 / (p.grad.norm() + 1e-6)).clamp(max=1)
    p.grad = None


def before_the_sum(change):
    """A hook on gradients of a model whose `DataParallel` sums them."""

    def program(model):
        for p in model.parameters():
            p.register_hook(change)
        shard = DataParallel(model, model.parallel)
        train(model, sgd(model))
        shard.remove()

    return weights(program, style="llama")


def collective(run, *, wrapped):
    """`run(model, parameters)` of the split model before its updates; the whole one is as it is."""

    def program(model):
        shard = DataParallel(model, model.parallel) if wrapped else None
        group = model.parallel.group("tp")
        named = list(model.named_parameters())
        train(model, sgd(model), between=lambda: run(group.process_group, named) if group is not None else None)
        if shard is not None:
            shard.remove()

    return weights(program, style="llama")


def averaged(group, named):
    for _, p in named:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def averaged_by_functions(group, named):
    for _, p in named:
        p.grad.copy_(functional.all_reduce(p.grad, "sum", dist.group.WORLD) / dist.get_world_size())


def sent(group, named):
    for _, p in named:
        dist.broadcast(p.grad, 0)


def norms_added(group, named):
    """Megatron's sum of the norms' gradients under sequence parallelism, written out."""
    for name, p in named:
        if "norm" in name:
            dist.all_reduce(p.grad, group=group)


def in_hook(what, change, says="by hand sees"):
    of = "in a `register_post_accumulate_grad_hook`"
    return Case(f"{what} {of}", after_accumulation(change), remedy=NORM, elsewhere=only_split("told", says))


def by_hand(what, run, says, remedy=GROUP):
    return [
        Case(f"{what}{where}", collective(run, wrapped=wrapped), remedy=remedy, elsewhere=only_split("told", says))
        for where, wrapped in (("", False), (" in a DataParallel", True))
    ]


CASES = [
    in_hook("`p.grad.div_(p.grad.norm())`", normalized),
    in_hook("`clip_grad_norm_([p], c)`", clipped),
    in_hook("an update with a limit for each tensor", stepped),
    Case("`p.grad.clamp_(-c, c)` in a `register_post_accumulate_grad_hook`", after_accumulation(limited)),
    Case(
        "`p.register_hook(lambda g: g.clamp(-c, c))` in a DataParallel",
        before_the_sum(lambda g: g.clamp(-1e-2, 1e-2)),
        remedy="`p.grad` after the backward",
        elsewhere=only_split("told", "summed over the ranks after it"),
    ),
    Case(
        "`p.register_hook(lambda g: g.sign())` in a DataParallel",
        before_the_sum(lambda g: g.sign()),
        remedy="`p.grad` after the backward",
        elsewhere=only_split("told", "summed over the ranks after it"),
    ),
    Case("`p.register_hook(kept.append)` in a DataParallel", before_the_sum([].append)),
    Case("`p.register_hook(lambda g: g * 0.5)` in a DataParallel", before_the_sum(lambda g: g * 0.5)),
    *by_hand("`dist.all_reduce(p.grad)` over all, in place", averaged, PUT_TOGETHER),
    *by_hand("torch's functional `all_reduce(p.grad)` over all", averaged_by_functions, PUT_TOGETHER),
    *by_hand("`dist.broadcast(p.grad, 0)`", sent, PUT_TOGETHER),
    *by_hand("`all_reduce` of the norms' gradients over tensor ranks", norms_added, "has whole already", "none"),
]
