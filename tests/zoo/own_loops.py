"""What loops do around a module of one's own: batches, seeds, initial values, clipping, norms, files."""

import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedAdamW, clip_grad_norm_, get_grad_norm
from core.tensor_parallel import Placement, full_tensor
from tests.zoo.case import Case, compared
from tests.zoo.own_model import (
    ONE,
    Model,
    batch,
    built,
    loss_of,
    sgd,
    states,
    train,
    weights,
    whole_weights,
)

CLIP = "`core.optimizer.clip_grad_norm_`"
FULL = "`core.tensor_parallel.full_tensor(p)`"


def on_each(loss):
    """Training with `loss(model, step, rank)`, where the whole model's rank is 0."""

    def run(variation):
        found = []
        for ps in states():
            model = built(ps)
            rank = ps.coordinate["tp"]
            train(model, loss=lambda model, step, rank=rank: loss(model, step, rank))
            found.append(whole_weights(model, ps))
        return compared(*found)

    return run


def other_labels(model, step, rank):
    tokens, _ = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), batch(step + 10 * rank)[1].flatten())


def other_seeds(variation):
    found = []
    for ps in states():
        model = built(ps, seed=1 + ps.coordinate["tp"])
        train(model)
        found.append(whole_weights(model, ps))
    return compared(*found)


def drawn_again(draw):
    """`model.apply`, with one seed on all ranks."""

    def program(model):
        torch.manual_seed(5)

        def fill(part):
            if isinstance(getattr(part, "weight", None), nn.Parameter) and part.weight.dim() > 1:
                draw(part.weight)

        model.apply(fill)
        train(model)

    return weights(program)


def by_width(weight):
    """A standard deviation by the fan-in, drawn into `data`."""
    weight.data = torch.randn(weight.shape) / weight.shape[-1] ** 0.5


def one_drawn(model):
    torch.manual_seed(5)
    nn.init.trunc_normal_(model.feedforward.down.weight, std=0.02)
    train(model)


def one_by_width(model):
    torch.manual_seed(5)
    by_width(model.feedforward.down.weight)
    train(model)


def one_file(variation):
    """Rank 0's `state_dict()`, loaded on all ranks."""
    found = []
    for ps in states():
        model = built(ps)
        train(model)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        files = [file.getvalue()]
        if ps.size("tp") > 1:
            dist.broadcast_object_list(files, src=0)
        model.load_state_dict(torch.load(io.BytesIO(files[0])))
        train(model)
        found.append(whole_weights(model, ps))
    return compared(*found)


def saved(make_file):
    """A checkpoint that one rank writes; training goes on."""

    def program(model):
        train(model)
        with torch.no_grad():
            model(batch(0)[0])
        torch.save(make_file(model), io.BytesIO())
        train(model)

    return weights(program)


def adamw_state(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return optimizer.state_dict()


def clipped(clip):
    return weights(lambda model: train(model, between=lambda model: clip(model.parameters(), 0.1)))


def logged(variation):
    found = []
    for ps in states():
        model = built(ps)
        loss_of(model).backward()
        found.append({"norm": torch.tensor(float(get_grad_norm(model.parameters(), parallel=ps)))})
    return compared(*found)


def clipped_right(variation):
    found = []
    for ps in states():
        model = built(ps)
        train(model, between=lambda model, ps=ps: clip_grad_norm_(model.parameters(), 0.1, parallel=ps))
        found.append(whole_weights(model, ps))
    return compared(*found)


def on_meta(variation):
    """Shapes alone, before any memory."""
    found = []
    for ps in states():
        with torch.device("meta"):
            model = Model(Placement.of(ps))
            found.append({"logits": torch.tensor(model(torch.zeros(2, 8, dtype=torch.long)).shape, device="cpu")})
    return compared(*found)


def bounded(model):
    optimizer = sgd(model)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_((1.0 / p.norm()).clamp(max=1.0))


def penalty(model, step):
    return loss_of(model, step) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())


def whole_penalty(variation):
    found = []
    for ps in states():
        model = built(ps)
        train(
            model,
            loss=lambda model, step, ps=ps: (
                loss_of(model, step) + 0.1 * sum(full_tensor(p, parallel=ps).norm() for p in model.parameters())
            ),
        )
        found.append(whole_weights(model, ps))
    return compared(*found)


def with_optimizer(make):
    return weights(lambda model: train(model, make(model.parameters())))


def lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(2):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def sharded(zero_stage):
    def run(variation):
        found = []
        for ps in states():
            model = built(ps)
            shard = DataParallel(model, ps, zero_stage=zero_stage)
            train(model, ShardedAdamW(shard, OptimizerConfig(lr=0.01, clip_grad=0.1)))
            shard.remove()
            found.append(whole_weights(model, ps))
        return compared(*found)

    return run


def copied(model):
    """Training a copy of a model that has been used, and one of a model that has not."""
    train(model)
    again = copy.deepcopy(model)
    train(again)
    return again


class Cloned(Model):
    """Layers that are copies of one, as nn.TransformerEncoder makes them."""

    def __init__(self, place):
        super().__init__(place)
        self.feedforward = nn.Sequential(*(copy.deepcopy(self.feedforward) for _ in range(2)))


def other_seeds_of_copies(variation):
    found = []
    for ps in states():
        model = built(ps, Cloned, seed=1 + ps.coordinate["tp"])
        train(model)
        found.append(whole_weights(model, ps))
    return compared(*found)


class ByKeyword(Model):
    def forward(self, *, tokens, labels):
        return {"loss": F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten())}


def keyword_batches(variation):
    found = []
    for ps in states():
        model, rank = built(ps, ByKeyword), ps.coordinate["tp"]

        def loss(model, step, rank=rank):
            tokens, labels = batch(step + 10 * rank)
            return model(tokens=tokens, labels=labels)["loss"]

        train(model, loss=loss)
        found.append(whole_weights(model, ps))
    return compared(*found)


class LocalWidth(Model):
    """Reads the width of its own part while it is made."""

    def __init__(self, place):
        super().__init__(place)
        self.width = self.feedforward.up.weight.shape[0]
        nn.init.zeros_(self.feedforward.up.bias)

    def forward(self, tokens):
        assert self.feedforward.up.weight.shape[0] == self.width
        return super().forward(tokens)


def wrapped(wrap):
    def program(model):
        outer = wrap(model)
        train(model, loss=lambda model, step: loss_of(outer, step))

    return weights(program)


def both(model):
    """Two losses of one model, and a look at it without gradients in between."""
    optimizer = sgd(model)
    for step in range(3):
        (loss_of(model, step) - 0.5 * loss_of(model, step + 1)).backward()
        model.eval()
        with torch.no_grad():
            loss_of(model, 7)
        model.train()
        optimizer.step()
        optimizer.zero_grad()


DIST = "`dist_checkpointing.save` and `load`"


def told(what, run, remedy=FULL, says="full_tensor"):
    return Case(what, run, "told", says, remedy, elsewhere={ONE: ("right", "")})


def refused(what, run, says, remedy):
    return Case(what, run, "refused", says, remedy, elsewhere={ONE: ("right", "")})


ONE_SEED = "one `torch.manual_seed` on all ranks, before the model is made"
SAME, GENERATOR = "split weights are the same", "a generator of its own per rank"
SAMPLER = "a sampler over `get_data_parallel_rank()`"

CASES = [
    Case("the loop of everybody", weights(train)),
    refused(
        "other batches per tensor rank",
        on_each(lambda m, step, rank: loss_of(m, step + 10 * rank)),
        "sampler",
        SAMPLER,
    ),
    refused(
        "other labels per tensor rank, the loss outside of the module",
        on_each(other_labels),
        "different losses",
        SAMPLER,
    ),
    refused("other batches per tensor rank, by keyword", keyword_batches, "sampler", SAMPLER),
    refused("other seeds per tensor rank", other_seeds, "torch.manual_seed", ONE_SEED),
    refused(
        "other seeds per tensor rank, layers that are copies of one",
        other_seeds_of_copies,
        "torch.manual_seed",
        ONE_SEED,
    ),
    refused("`model.apply` with `nn.init.normal_`", drawn_again(nn.init.normal_), SAME, GENERATOR),
    refused("`model.apply` with `nn.init.kaiming_uniform_`", drawn_again(nn.init.kaiming_uniform_), SAME, GENERATOR),
    refused("`model.apply` with a draw of the part's shape", drawn_again(by_width), SAME, GENERATOR),
    told("one split weight drawn again with `nn.init`", weights(one_drawn), GENERATOR, "generator"),
    told("one split weight drawn again through `data`", weights(one_by_width), GENERATOR, "same on the"),
    told("`torch.save(model.state_dict(), file)`", saved(lambda m: m.state_dict()), DIST, "loses the others"),
    told(
        "`torch.save({n: p.detach().cpu() for n, p in model.named_parameters()}, file)`",
        saved(lambda m: {name: p.detach().cpu() for name, p in m.named_parameters()}),
        DIST,
        "a file gets .*part of",
    ),
    told(
        "`torch.save(optimizer.state_dict(), file)`", saved(adamw_state), DIST, "a file gets .*exp_avg of .*part of"
    ),
    refused(
        "rank 0's `state_dict()` loaded on all ranks",
        one_file,
        "dist_checkpointing.load",
        DIST,
    ),
    refused(
        "`torch.nn.utils.clip_grad_norm_` without DataParallel",
        clipped(torch.nn.utils.clip_grad_norm_),
        "clip_grad_norm_",
        CLIP,
    ),
    Case("`core.optimizer.clip_grad_norm_`", clipped_right),
    Case("`core.optimizer.get_grad_norm`", logged),
    told("max-norm after the step", weights(bounded)),
    told("weight decay in the loss, `p.pow(2).sum()`", weights(lambda m: train(m, loss=penalty))),
    Case("a group lasso over `full_tensor(p)`", whole_penalty),
    Case("a forward on the meta device", on_meta),
    Case("AdamW", with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01))),
    told(
        "Adafactor",
        with_optimizer(lambda p: torch.optim.Adafactor(p, lr=0.01)),
        "AdamW, SGD, `ShardedMuon`",
        "Adafactor",
    ),
    refused("LBFGS", weights(lbfgs), "LBFGS takes products of parts", "AdamW, SGD"),
    Case("`ShardedAdamW` over ZeRO-1", sharded(1)),
    Case("`ShardedAdamW` over ZeRO-3", sharded(3)),
    Case("a deep copy, trained on", weights(copied)),
    Case("layers that are copies of one", weights(train, Cloned)),
    Case("a module that reads the width of its own part", weights(train, LocalWidth)),
    Case("a module inside another one of the program's", wrapped(lambda m: nn.Sequential(m, nn.Identity()))),
    Case("two forwards before a backward, an evaluation before the step", weights(both)),
]
