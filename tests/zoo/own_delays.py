"""What a module of one's own does between its linears in some forwards only, or in compiled parts."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

from core.parallel_state.layout import layout_of
from core.tensor_parallel import gather_from_tensor_region, scatter_to_tensor_region
from tests.zoo.case import Case
from tests.zoo.own_activations import GATHER, REDUCED, grouped, told
from tests.zoo.own_functions import DROPOUT
from tests.zoo.own_model import ONE, Feedforward, tensor_rank, train, weights

STEPS = 9


class Delayed:
    """`function(y)` in the forwards that `is_on` says, counted from 0; before, `F.gelu`."""

    def __init__(self, function, is_on):
        self.function, self.is_on, self.forwards = function, is_on, 0

    def __call__(self, y):
        self.forwards += 1
        y = F.gelu(y)
        return self.function(y) if self.is_on(self.forwards - 1) else y


def delayed(function, is_on):
    return weights(
        partial(train, steps=STEPS), feedforward=lambda place: Feedforward(place, Delayed(function, is_on))
    )


def late(forward):
    return forward >= 5


def lazy(forward):
    return forward % 3 == 2


def compiled(function, *, whole=False):
    def program(model):
        part = model if whole else model.feedforward
        part.compile(backend="eager")
        train(model)
        torch._dynamo.reset()

    return weights(program, feedforward=lambda place: Feedforward(place, lambda y: function(F.gelu(y))))


def quantised(y):
    scale = y.detach().abs().max() / 127
    return y + ((y / scale).round() * scale - y).detach()


def largest(y):
    return y * (y.abs() >= y.abs().topk(y.shape[-1] // 4, -1).values[..., -1:])


def normed(y):
    return F.layer_norm(y, y.shape[-1:])


def guarded(agree):
    """Gradients that are not finite are zeroed, matrix by matrix; an infinity lies in a part of two."""

    def zero_bad(model):
        up, down = model.feedforward.up.weight.grad, model.feedforward.down.weight.grad
        with torch._C.DisableTorchFunctionSubclass():
            # a row of the first rank, a column of the last
            if tensor_rank() == 0:
                up.view(-1, up.shape[-1])[3] = torch.inf
            if tensor_rank() == 1 or not dist.is_initialized():
                down[:, -1] = torch.inf
        for parameter in model.parameters():
            is_finite = torch.isfinite(parameter.grad).all()
            if not (agree(is_finite) if "tp" in layout_of(parameter).split else is_finite):
                parameter.grad.zero_()

    return weights(partial(train, between=zero_bad))


def of_all_ranks(is_finite):
    flag = is_finite.int()
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return flag


def normed_whole(y, place, cut):
    """A layer norm of all columns, and then this rank's."""
    if place.group is not None:
        place.group.compared = 0  # other cases compare in these ranks, too
    whole = gather_from_tensor_region(y, place.group)
    return cut(F.layer_norm(whole, whole.shape[-1:]), place)


CASES = [
    told(
        "all columns normed, `x.chunk(place.tp, -1)[place.rank]` of them",
        grouped(lambda y, place: normed_whole(y, place, lambda x, place: x.chunk(place.tp, -1)[place.rank])),
        "`scatter_to_tensor_region`",
        "loses what the others have",
    ),
    Case(
        "all columns normed, then `scatter_to_tensor_region`",
        grouped(lambda y, place: normed_whole(y, place, lambda x, place: scatter_to_tensor_region(x, place.group))),
    ),
    Case(
        "`if not torch.isfinite(p.grad).all(): p.grad.zero_()`",
        guarded(lambda is_finite: is_finite),
        "told",
        "what one rank decides by it",
        "`all_reduce(flag, op=MIN)` over the tensor group",
        elsewhere={ONE: ("right", "")},
    ),
    told("a quantiser that begins at step 5", delayed(quantised, late), GATHER, REDUCED),
    told("the largest columns, from step 5 on", delayed(largest, late), GATHER, REDUCED),
    told("dropout that begins at step 5", delayed(partial(F.dropout, p=0.2), late), DROPOUT, "draw the same"),
    told("a layer norm in every third step", delayed(normed, lazy), GATHER, REDUCED),
    told("`F.normalize` in every third step", delayed(partial(F.normalize, dim=-1), lazy), GATHER, REDUCED),
    Case("another activation from step 5 on", delayed(F.silu, late)),
    Case("clamped in every third step", delayed(lambda y: y.clamp(-0.1, 0.1), lazy)),
    told("`block.compile()` with a layer norm over the width", compiled(normed), GATHER, REDUCED),
    told("`block.compile()` with dropout", compiled(partial(F.dropout, p=0.2)), DROPOUT, "draw the same"),
    told("`model.compile()` with a quantiser", compiled(quantised, whole=True), GATHER, REDUCED),
    Case("`block.compile()` of what is elementwise", compiled(torch.tanh)),
    Case("`model.compile()` of what is elementwise", compiled(torch.tanh, whole=True)),
]
