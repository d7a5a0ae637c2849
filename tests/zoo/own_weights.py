"""What a module of one's own computes of its parallel weights inside its forward, and hooks that come late."""

import torch
from torch.nn import functional as F

from core.parallel_state import ParallelState
from core.tensor_parallel import copy_to_tensor_region, full_tensor, reduce_from_tensor_region
from tests.states import state
from tests.zoo.case import Case
from tests.zoo.own_model import FFN, ONE, Feedforward, H, batch, train, weights

DRAWN = "noise of the whole, `whole.chunk(place.tp, dim)[place.rank]`, or a generator per rank"
ALIKE = "part of a weight.*same on all 2 ranks.*place.rank"
FULL = "`core.tensor_parallel.full_tensor(weight)`"


class ByWeight(Feedforward):
    """The first linear by hand, with `function(weight)`; a penalty of its weight, `penalty_of(weight, place)`."""

    def __init__(self, place, function=lambda w: w, penalty_of=None, copies=True):
        super().__init__(place)
        self.copies = copies
        self.function, self.penalty_of, self.place, self.penalty = function, penalty_of, place, 0.0

    def forward(self, x):
        if self.penalty_of is not None:
            self.penalty = self.penalty_of(self.up.weight, self.place)
        if self.copies:
            x = copy_to_tensor_region(x, self.place.group)
        y = F.linear(x, self.function(self.up.weight), self.up.bias)
        return self.down(F.gelu(y))


def loss_of(model, step):
    tokens, labels = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) + 0.1 * model.feedforward.penalty


def used(function):
    return weights(train, feedforward=lambda place: ByWeight(place, function))


def penalized(penalty_of):
    return weights(
        lambda model: train(model, loss=loss_of), feedforward=lambda place: ByWeight(place, penalty_of=penalty_of)
    )


def rounded(w, scale):
    """To 8 bits, with the gradient of what is rounded."""
    return w + ((w / scale * 127).round() * scale / 127 - w).detach()


def whole_norm(weight, place):
    ps = state(tp=place.tp) if place.tp > 1 else ParallelState.single("cpu")
    return full_tensor(weight, parallel=ps).norm()


class Noisy(ByWeight):
    """Noise on the first weight, `draw(weight, place)` (NoisyNet, Bayes by backprop)."""

    def __init__(self, place, draw):
        super().__init__(place, lambda w: w + 0.1 * draw(w, place))


def noisy(draw):
    def program(model):
        torch.manual_seed(4)
        train(model)

    return weights(program, feedforward=lambda place: Noisy(place, draw))


def cut_noise(w, place):
    return torch.randn(FFN, H).chunk(place.tp)[place.rank]


def noise_of_rank(w, place):
    """A generator per rank: which of its rows the whole would get is seen where the draws are put together."""
    generators = [torch.Generator().manual_seed(7 + rank) for rank in range(2)]
    rows = FFN // 2
    drawn = [torch.empty(rows, H, dtype=w.dtype).normal_(generator=generator) for generator in generators]
    return torch.cat(drawn).chunk(place.tp)[place.rank]


def filled_by_rank(w, place):
    """The same of what is made like the weight."""
    if place.tp == 1:
        return noise_of_rank(w, place)
    return torch.zeros_like(w).normal_(generator=torch.Generator().manual_seed(7 + place.rank))


def late(function):
    """A forward hook on the first linear after some steps."""

    def program(model):
        train(model)
        model.feedforward.up.register_forward_hook(lambda module, args, y: function(y))
        train(model)

    return weights(program)


def renormed(dim):
    """Norms of columns or rows bound after each step."""

    def program(model):
        for _ in range(3):
            train(model, steps=1)
            with torch.no_grad():
                for name, w in model.named_parameters():
                    if name.endswith("up.weight"):
                        w.div_(w.norm(dim=dim, keepdim=True).clamp(min=0.2))

    return weights(program)


def moments(change):
    """What a program does to AdamW's states of the first linear after each step."""

    def program(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            train(model, optimizer, steps=1)
            with torch.no_grad():
                change(optimizer.state[model.feedforward.up.weight], model.feedforward.up.weight)

    return weights(program)


def forget_rows(state, weight):
    state["exp_avg"][[1, 5]] = 0


def forget_where_small(state, weight):
    state["exp_avg"].mul_(weight.abs() > 0.05)
    assert sum(value.numel() for value in state.values()) > 0


def by_update_norm(state, weight):
    weight.sub_(0.1 * state["exp_avg"] / state["exp_avg"].norm())


def consolidated(model):
    """EWC: importances are added up in buffers that were made before the first forward."""
    importance = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):
        train(model, steps=1, between=lambda m: [importance[n].add_(p.grad**2) for n, p in m.named_parameters()])
    penalty = sum((importance[n] * (p - start[n]) ** 2).sum() for n, p in model.named_parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - penalty)


def told(what, run, remedy=FULL, says="part of a weight.*full_tensor"):
    return Case(what, run, "told", says, remedy, elsewhere={ONE: ("right", "")})


CASES = [
    told("a norm of `self.up.weight` in forward, for a penalty", penalized(lambda w, place: w.norm())),
    told("`self.up.weight.pow(2).sum()` in forward", penalized(lambda w, place: w.pow(2).sum())),
    told("a quantiser's scale in forward, `weight.abs().max()`", used(lambda w: rounded(w, w.detach().abs().max()))),
    told("a weight over its norm in forward", used(lambda w: w / w.norm())),
    told("noise in forward, `torch.randn(weight.shape)`", noisy(lambda w, place: torch.randn(w.shape)), DRAWN, ALIKE),
    told(
        "noise in forward, `torch.normal(0, 1, size=weight.size())`",
        noisy(lambda w, place: torch.normal(0.0, 1.0, size=w.size())),
        DRAWN,
        ALIKE,
    ),
    told(
        "noise in forward, by rows and columns (NoisyNet)",
        noisy(lambda w, place: torch.outer(torch.randn(w.shape[0]), torch.randn(w.shape[1]))),
        DRAWN,
        ALIKE,
    ),
    told(
        "a mask in forward, `torch.rand(weight.shape) > p`",
        noisy(lambda w, place: (torch.rand(w.shape) > 0.2).to(w.dtype)),
        DRAWN,
        ALIKE,
    ),
    told(
        "noise in forward, `torch.zeros_like(weight).normal_()`",
        noisy(lambda w, place: torch.zeros_like(w).normal_()),
        "a generator of its own on each rank",
        "seeded alike",
    ),
    told(
        "noise in forward, `zeros_like(weight).normal_(generator=g)`, g seeded alike",
        noisy(lambda w, place: torch.zeros_like(w).normal_(generator=torch.Generator().manual_seed(7))),
        "a generator of its own on each rank",
        ALIKE,
    ),
    Case("noise of the whole weight in forward, cut", noisy(cut_noise)),
    Case("noise in forward by a generator per rank", noisy(noise_of_rank)),
    Case("noise in forward, `zeros_like(weight).normal_(generator=g)`, g of the rank", noisy(filled_by_rank)),
    Case("`full_tensor(weight).norm()` in forward", penalized(whole_norm)),
    Case(
        "a sum of a weight by `reduce_from_tensor_region` in forward",
        penalized(lambda w, place: reduce_from_tensor_region(w.pow(2).sum(), place.group)),
    ),
    Case(
        "a linear by hand without `copy_to_tensor_region`",
        weights(train, feedforward=lambda place: ByWeight(place, copies=False)),
        "refused",
        r"copy_to_tensor_region\(x, group\)",
        "`core.tensor_parallel.copy_to_tensor_region(x, group)` before it",
        elsewhere={ONE: ("right", "")},
    ),
    Case("a linear by hand with `weight * 2`, `weight.t()`", used(lambda w: (w.t() * 2).mT)),
    Case(
        "a scale of each row of a column linear", used(lambda w: rounded(w, w.detach().abs().amax(1, keepdim=True)))
    ),
    Case("rows of a column linear of norm 1", used(lambda w: w / torch.linalg.vector_norm(w, dim=1, keepdim=True))),
    Case("after each step, rows of a column linear of norm 1", renormed(1)),
    told("after each step, columns of a column linear of norm 1", renormed(0), says="by hand.*full_tensor"),
    told(
        "a hook that comes after some steps, `y / y.std(-1)`",
        late(lambda y: y / y.std(-1, keepdim=True)),
        "`gather_from_tensor_region`",
        "gather_from_tensor_region",
    ),
    Case("a hook that comes after some steps, `torch.nan_to_num(y) * 2`", late(lambda y: torch.nan_to_num(y) * 2)),
    told("rows by number of AdamW's moments set to 0", moments(forget_rows), "a mask of values", "exp_avg of .*rows"),
    told(
        "a norm of AdamW's moments", moments(by_update_norm), "`all_reduce` over the tensor group", "exp_avg of .*sum"
    ),
    Case("AdamW's moments times a mask of their values, their sizes summed", moments(forget_where_small)),
    told(
        "EWC's penalty over buffers made before the first forward", weights(consolidated), says="by hand.*full_tensor"
    ),
]
