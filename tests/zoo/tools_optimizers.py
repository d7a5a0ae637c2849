"""torch's optimizers, schedulers, clipping and scaling on a model that ranks share."""

import copy

import torch
import torch.distributed as dist

from core.optimizer import GradScaler, clip_grad_norm_, get_grad_norm
from tests.zoo.case import Case
from tests.zoo.split_model import (
    CLIP,
    LR,
    ONE,
    STEPS,
    loss_of,
    models,
    only_split,
    results,
    sgd,
    train,
    weights,
)

optim = torch.optim


def with_optimizer(kind, **arguments):
    # without biases: that of a key has no gradient but rounding, of which Adam and Rprop make whole steps
    return weights(lambda model: train(model, kind(model.parameters(), **arguments)), style="llama")


def zero_redundancy(kind, **arguments):
    """torch's own, over this model's data group, which is of one rank here."""

    def make(parameters):
        # torch's needs a process group, which a world of one rank has none of
        if not dist.is_initialized():
            return kind(parameters, **arguments)
        # its import warns
        from torch.distributed.optim import ZeroRedundancyOptimizer

        group, _ = dist.new_subgroups(1)
        return ZeroRedundancyOptimizer(parameters, kind, process_group=group, **arguments)

    return weights(lambda model: train(model, make(model.parameters())), style="llama")


def no_decay_for_vectors(model):
    named = dict(model.named_parameters())
    flat = [p for name, p in named.items() if name.endswith("bias") or "norm" in name]
    rest = [p for p in named.values() if all(p is not q for q in flat)]
    train(
        model,
        torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=LR),
    )


def scheduled(make):
    def program(model):
        optimizer = sgd(model)
        scheduler = make(optimizer)
        for step in range(STEPS):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss.item()) if plateau else scheduler.step()

    return weights(program)


def clipped(clip):
    return weights(lambda model: train(model, between=lambda: clip(model)))


def norms(model):
    loss_of(model).backward()
    return {str(p): get_grad_norm(model, p, parallel=model.parallel) for p in (1.0, 2.0, 3.0, float("inf"))}


def torch_norm_as_reference(variation):
    split, whole = models(variation)
    for model in (split, whole):
        loss_of(model).backward()
    return {
        "norm": (
            get_grad_norm(split.parameters(), parallel=split.parallel),
            torch.nn.utils.get_total_norm(p.grad for p in whole.parameters()),
        )
    }


def scaled(make):
    """The gradient of one tensor rank overflows in the second step."""

    def program(model):
        optimizer, scaler = sgd(model), make(model)
        for step in range(STEPS):
            scaler.scale(loss_of(model, step)).backward()
            if step == 1 and model.place.rank == 0:
                model.decoder.layers["1"].mlp.linear_fc1.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        loss_of(model)

    return weights(program)


def in_backward(model):
    """An optimizer per parameter, that steps inside backward."""
    optimizers = {p: torch.optim.SGD([p], lr=LR) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(STEPS):
        loss_of(model, seed).backward()


def optimizer_saved(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    train(model, optimizer, 2)
    other = torch.optim.AdamW(model.parameters(), lr=1.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, other, 1)


CASES = [
    *(
        Case(f"`torch.optim.{kind.__name__}`", with_optimizer(kind, lr=LR, **more))
        for kind, more in [
            (optim.AdamW, {}),
            (optim.Adam, {"foreach": False}),
            (optim.SGD, {"momentum": 0.9, "nesterov": True}),
            (optim.Adagrad, {}),
            (optim.RMSprop, {}),
            (optim.NAdam, {}),
            (optim.RAdam, {}),
            (optim.Adamax, {}),
            (optim.Adadelta, {}),
            (optim.ASGD, {}),
            (optim.Rprop, {}),
        ]
    ),
    *(
        Case(
            f"`torch.optim.{kind.__name__}`",
            weights(lambda m, kind=kind: train(m, kind([p for p in m.parameters() if p.dim() == 2], lr=LR)), **more),
            "told",
            "look at a matrix as a whole",
            remedy="elementwise optimizers, or `core.optimizer.ShardedMuon`",
            elsewhere={ONE: one},
        )
        for kind, more, one in [
            (optim.Adafactor, {}, ("right", "")),
            (optim.Muon, {}, ("right", "")),
        ]
    ),
    Case(
        "`torch.optim.Adafactor` over the fused projections",
        with_optimizer(optim.Adafactor, lr=LR),
        "told",
        r"\[groups, heads, d, h\]",
        remedy="elementwise optimizers",
    ),
    Case("torch's `ZeroRedundancyOptimizer` of AdamW over the data group", zero_redundancy(optim.AdamW, lr=LR)),
    Case(
        "torch's `ZeroRedundancyOptimizer` of Adafactor over the data group",
        zero_redundancy(optim.Adafactor, lr=LR),
        "told",
        "Adafactor may look at a matrix as a whole",
        remedy="elementwise optimizers",
    ),
    Case("AdamW with `fused=True`", with_optimizer(optim.AdamW, lr=LR, fused=True)),
    Case("AdamW, `maximize` and `amsgrad`", with_optimizer(optim.AdamW, lr=LR, maximize=True, amsgrad=True)),
    Case("Parameter groups without decay for biases and norms", weights(no_decay_for_vectors, style="llama")),
    Case("CosineAnnealingLR", scheduled(lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 4))),
    Case("OneCycleLR", scheduled(lambda o: optim.lr_scheduler.OneCycleLR(o, LR, total_steps=6))),
    Case("ReduceLROnPlateau", scheduled(lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, patience=0))),
    Case("LambdaLR", scheduled(lambda o: optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)))),
    Case("An optimizer's `state_dict`, loaded into another", weights(optimizer_saved, style="llama")),
    Case("An optimizer inside backward (`register_post_accumulate_grad_hook`)", weights(in_backward)),
    Case(
        "`torch.nn.utils.clip_grad_norm_`",
        clipped(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)),
        remedy="`core.optimizer.clip_grad_norm_`: the norm of the whole model",
        elsewhere=only_split("refused", CLIP),
    ),
    Case(
        "`torch.nn.utils.get_total_norm` and `clip_grads_with_norm_`",
        clipped(
            lambda model: torch.nn.utils.clip_grads_with_norm_(
                model.parameters(), 0.5, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            )
        ),
        remedy="`core.optimizer.clip_grad_norm_`, `core.optimizer.get_grad_norm`",
        elsewhere=only_split("refused", CLIP),
    ),
    Case(
        "`core.optimizer.clip_grad_norm_`",
        clipped(lambda model: clip_grad_norm_(model.parameters(), 0.5, parallel=model.parallel)),
    ),
    Case(
        "`core.optimizer.clip_grad_norm_(model, c, inf)`",
        clipped(lambda model: clip_grad_norm_(model, 0.05, float("inf"), parallel=model.parallel)),
    ),
    Case("`core.optimizer.get_grad_norm` of order 1, 2, 3 and inf", results(norms)),
    Case("`core.optimizer.get_grad_norm` against torch's of the whole model", torch_norm_as_reference),
    Case(
        "`torch.nn.utils.clip_grad_value_`",
        clipped(lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-2)),
    ),
    Case(
        "`torch.amp.GradScaler`, an overflow on one tensor rank",
        scaled(lambda model: torch.amp.GradScaler("cpu", init_scale=8.0)),
        remedy="`core.optimizer.GradScaler`: all ranks skip",
        elsewhere=only_split("refused", "core.optimizer.GradScaler"),
    ),
    Case(
        "`core.optimizer.GradScaler`, an overflow on one tensor rank",
        scaled(lambda model: GradScaler("cpu", init_scale=8.0, parallel=model.parallel)),
    ),
]
