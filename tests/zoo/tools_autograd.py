"""Loops, tools of autograd and hooks on a model that ranks share."""

import copy
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.tensor_parallel import gather_from_sequence_region
from tests.models.gpt import batch
from tests.parity.whole import whole_gradients
from tests.zoo.case import Case, compared
from tests.zoo.split_model import (
    LR,
    SEQUENCE,
    STEPS,
    gradients,
    loss_of,
    models,
    only_split,
    results,
    sgd,
    train,
    two_losses,
    weights,
)

optim = torch.optim


def accumulated(model):
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            (loss_of(model, 2 * step + part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen(model):
    model.embedding.requires_grad_(False)
    model.decoder.layers["0"].self_attention.linear_qkv.weight.requires_grad_(False)
    train(model)


def frozen_later(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    train(model, optimizer, 1)
    model.decoder.layers["0"].requires_grad_(False)
    train(model, optimizer, 2)


def by_hand(model):
    for step in range(STEPS):
        loss_of(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
                p.grad = None


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(model, optimizer, 1)
        average.update_parameters(model)
    return average.module


def copied(model):
    train(model, steps=1)
    other = copy.deepcopy(model)
    train(other, steps=2)
    return other


def dead_forward(model):
    """A forward without backward, and one under no_grad, between the steps."""
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(model, optimizer, 1)
        loss_of(model, 7)
        with torch.no_grad():
            model.eval()
            loss_of(model, 8)
            model.train()


def functional(model):
    parameters = {n: (p * 1.5).detach().requires_grad_() for n, p in model.named_parameters()}
    tokens, labels = batch()
    loss = torch.func.functional_call(model, parameters, (tokens,), {"labels": labels}).sum()
    found = torch.autograd.grad(loss, list(parameters.values()))
    for p, g in zip(model.parameters(), found, strict=True):
        p.grad = g


def autograd_grad(model):
    found = torch.autograd.grad(loss_of(model), list(model.parameters()))
    for p, g in zip(model.parameters(), found, strict=True):
        p.grad = g


def gradient_penalty(model):
    inputs = [model.decoder.final_layernorm.weight]
    (g,) = torch.autograd.grad(loss_of(model), inputs, create_graph=True)
    g.square().sum().backward()


def transformed(model):
    """Gradients of each sample, as torch.func's page has them."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, tokens, labels):
        return torch.func.functional_call(model, parameters, (tokens[None],), {"labels": labels[None]}).sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, *batch())


def forward_mode(model):
    tokens, labels = batch()
    names, values = zip(*model.named_parameters(), strict=True)

    def loss(*parameters):
        return torch.func.functional_call(
            model, dict(zip(names, parameters, strict=True)), (tokens,), {"labels": labels}
        ).sum()

    return {"jvp": torch.func.jvp(loss, values, tuple(torch.ones_like(v) for v in values))[1]}


def checkpointed(use_reentrant, dropout=0.0):
    def program(model):
        def wrap(layer):
            forward = layer.forward
            layer.forward = lambda *args: checkpoint(forward, *args, use_reentrant=use_reentrant)

        if use_reentrant:  # which asks for an input that wants a gradient
            model.embedding.register_forward_hook(
                lambda module, args, y: y.requires_grad_() if not y.requires_grad else y
            )
        for layer in model.decoder.layers.values():
            wrap(layer)
        two_losses(model)

    return gradients(program, facts={"hidden_dropout": dropout, "attention_dropout": dropout})


def checkpointed_dropout(variation):
    """The masks of each forward are its own, though torch runs it again after the other's."""
    found = []
    for again in (True, False):
        torch.manual_seed(3)
        model = next(models(variation, facts={"hidden_dropout": 0.2, "attention_dropout": 0.2}))
        if again:
            for layer in model.decoder.layers.values():
                forward = layer.forward
                layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        two_losses(model)
        found.append(whole_gradients(model, model.parallel))
    return compared(*found)


def offloaded(model):
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model)
    loss.backward()


def packed(model):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = loss_of(model)
    loss.backward()


def anomaly(model):
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(model).backward()


def profiled(model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loss_of(model).backward()


def retained(model):
    """Backward twice over the layers (the loss is made anew: its buffer is used up)."""
    tokens, _ = batch()
    x = model.embedding(tokens).detach().requires_grad_()
    y = model.decoder(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    loss_of(model).backward()


# hooks


def hooked(model):
    layer = model.decoder.layers["0"]
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))
    layer.mlp.register_forward_hook(lambda module, args, y: y * 0.9)
    layer.self_attention.register_full_backward_hook(
        lambda module, gx, gy: tuple(None if g is None else g * 0.5 for g in gx)
    )
    layer.mlp.linear_fc1.weight.register_hook(lambda g: g * 2)
    layer.input_layernorm.weight.register_hook(lambda g: g.clamp(-1e-2, 1e-2))
    loss_of(model).backward()


def tensor_hook(model):
    model.decoder.layers["1"].register_forward_hook(lambda module, args, y: y.register_hook(lambda g: g * 3) and None)
    loss_of(model).backward()


def global_hook(model):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, y: y * 1.01 if type(module).__name__ == "MLP" else None
    )
    loss_of(model).backward()
    handle.remove()


def features(model):
    kept = {}
    for n, layer in model.decoder.layers.items():
        layer.register_forward_hook(lambda module, args, y, n=n: kept.update({n: y}))
    with torch.inference_mode():
        loss_of(model)
    group = model.place.group if model.place.splits_sequence else None
    return {n: gather_from_sequence_region(y, group) for n, y in kept.items()}


def in_backward(module, change, *, pre=False):
    """A backward hook on a module with `change(gradient, rows)`; rows: makes all rows of a gradient of some."""

    def program(model):
        group = model.place.group if model.place.splits_sequence else None
        part = model.get_submodule(module)
        rows = partial(gather_from_sequence_region, group=group, to_tensor_region=False)
        if pre:
            part.register_full_backward_pre_hook(lambda module, gy: (change(gy[0], rows), *gy[1:]))
        else:
            part.register_full_backward_hook(lambda module, gx, gy: (change(gx[0], rows), *gx[1:]))
        train(model)

    return weights(program)


def clipped(gradient, rows):
    return gradient * (1e-3 / gradient.norm()).clamp(max=1)


def clipped_by_all(gradient, rows):
    return gradient * (1e-3 / rows(gradient).norm()).clamp(max=1)


LAYER, HEADS = "decoder.layers.1", "decoder.layers.1.self_attention.core_attention"
OF_ROWS = {SEQUENCE: ("told", "norm in a backward hook.*rows.*gather_from_sequence_region")}
OF_COLUMNS = only_split("told", "gather_from_tensor_region")
ALL_ROWS = "`gather_from_sequence_region(g, group, to_tensor_region=False)`"
HOOKED = {SEQUENCE: ("told", r"this rank's rows, \[s/tp, b, h\]")}
CASES = [
    Case("Gradient accumulation", weights(accumulated)),
    Case("Two forwards, then one backward", gradients(two_losses)),
    Case(
        "`zero_grad(set_to_none=False)`",
        weights(lambda m: train(m, o := sgd(m), zero=lambda: o.zero_grad(set_to_none=False))),
    ),
    Case("Freezing before training", weights(frozen)),
    Case("Freezing in the middle of training", weights(frozen_later)),
    Case("An update by hand under `no_grad`, `p.grad = None`", weights(by_hand)),
    Case("`swa_utils.AveragedModel` (EMA)", weights(averaged)),
    Case("`copy.deepcopy` of a model that has trained", weights(copied)),
    Case("Forwards without backward between the steps, `eval`, `no_grad`", weights(dead_forward)),
    Case("`torch.func.functional_call`", gradients(functional)),
    Case("`torch.autograd.grad`", gradients(autograd_grad)),
    Case(
        "A gradient penalty (second derivatives)",
        gradients(gradient_penalty),
        "refused",
        "has no second derivative",
        remedy="first derivatives only: the loss and the collectives have no second ones",
    ),
    Case(
        "`torch.func.jvp` (forward mode)",
        results(forward_mode),
        "refused",
        "transform of torch.func",
        remedy="reverse mode only",
    ),
    Case(
        "`torch.func.vmap(torch.func.grad(...))`, gradients of each sample",
        results(transformed),
        "refused",
        "transform of torch.func",
        remedy="a loop over the samples, `torch.autograd.grad`",
    ),
    Case("`torch.utils.checkpoint(use_reentrant=False)` around layers", checkpointed(False)),
    Case("`torch.utils.checkpoint(use_reentrant=True)` around layers", checkpointed(True), elsewhere=HOOKED),
    Case("`torch.utils.checkpoint`, dropout, two forwards, then backward", checkpointed_dropout),
    Case("`torch.autograd.graph.save_on_cpu`", gradients(offloaded)),
    Case("`saved_tensors_hooks`", gradients(packed)),
    Case("`detect_anomaly`", gradients(anomaly), "told", "Anomaly Detection has been enabled"),
    Case("`torch.profiler`", gradients(profiled)),
    Case("`retain_graph=True` over the layers", gradients(retained)),
    Case("Hooks on modules and parameters that change values", gradients(hooked), elsewhere=HOOKED),
    Case(
        "A layer's gradient by its norm, in a backward hook",
        in_backward(LAYER, clipped),
        "right",
        "",
        ALL_ROWS,
        OF_ROWS,
    ),
    Case(
        "A layer's gradient by its norm, in a backward pre-hook",
        in_backward(LAYER, clipped, pre=True),
        "right",
        "",
        ALL_ROWS,
        OF_ROWS,
    ),
    Case("A layer's gradient by the norm of all rows, in a backward hook", in_backward(LAYER, clipped_by_all)),
    Case("A layer's gradient clamped, in a backward hook", in_backward(LAYER, lambda g, rows: g.clamp(-1e-3, 1e-3))),
    Case(
        "The attention's gradient by its norm, in a backward hook",
        in_backward(HEADS, clipped),
        elsewhere=OF_COLUMNS,
        remedy="`gather_from_tensor_region`",
    ),
    Case(
        "The attention's gradient halved, in a backward pre-hook", in_backward(HEADS, lambda g, rows: g / 2, pre=True)
    ),
    Case("Hooks on tensors", gradients(tensor_hook), elsewhere=HOOKED),
    Case("A hook on every module (`register_module_forward_hook`)", gradients(global_hook)),
    Case(
        "Features by forward hooks in `inference_mode`",
        results(features),
        elsewhere=HOOKED,
    ),
]
