"""Means over context ranks' own rows that no function shows: compiled, in torch.func, in a Function of one's own."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from core.context_parallel import gather_from_context_region
from core.parallel_state import ParallelState
from tests.models.gpt import VOCAB, gpt
from tests.states import state
from tests.zoo.case import Case, Family, compared
from tests.zoo.context_batches import summed_over_ranks
from tests.zoo.context_losses import LAYOUTS, LR, STEPS, Program, S, by, cut

ALL = "`all_reduce(n, group=get_data_parallel_group(with_context_parallel=True))`"
# of all sequences, as a program counts them before the batch is cut
TOKENS = torch.tensor(2.0 * S)


def without_sums(variation):
    """Weights after some steps of a loop in which nobody sums gradients over the ranks."""
    found = []
    for ps in (state(**LAYOUTS[variation][0]), ParallelState.single("cpu")):
        model = gpt("llama", parallel=ps)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(STEPS):
            Program(model, ps, step).losses().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: p.detach() for name, p in model.named_parameters() if "norm" in name})
    return compared(*found)


def masked_mean(losses, mask):
    return (losses * mask).sum() / mask.sum()


class MaskedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses, mask):
        ctx.save_for_backward(mask)
        return masked_mean(losses, mask)

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return gradient * mask / mask.sum(), None


class FusedCrossEntropy(torch.autograd.Function):
    """Its gradient is made in forward, as in kernels that save the memory of logits."""

    @staticmethod
    def forward(ctx, logits, labels):
        with torch.enable_grad():
            # a kernel reads memory: nothing of it is heard
            x = torch.from_numpy(logits.detach().numpy().copy()).requires_grad_()
            loss = F.cross_entropy(x, labels)
        ctx.save_for_backward(*torch.autograd.grad(loss, x))
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def by_functional(program):
    losses = program.losses()
    gradient, loss = torch.func.grad_and_value(masked_mean)(losses.detach(), program.mask)
    return (losses * gradient).sum() + (loss - (losses * gradient).sum()).detach()


def fused(program):
    labels = program.labels.masked_fill(program.mask == 0, -100)
    return FusedCrossEntropy.apply(program.logits().flatten(0, 1), labels.flatten())


def traced(losses, mask):
    return torch.jit.trace(masked_mean, (losses.detach(), mask))(losses, mask)


def retained(program):
    losses = program.losses()
    losses.retain_grad()
    assert losses.grad is None
    losses.mean().backward()
    assert losses.grad.shape == losses.shape
    program.model.zero_grad()
    return program.losses().mean()


def returns(values):
    """Sums from each place to the end, by numpy: [..., s]."""
    values = values.detach().numpy()
    return torch.from_numpy(values[:, ::-1].cumsum(1)[:, ::-1].copy())


def returns_of_all(program, values):
    whole = gather_from_context_region(values.detach(), program.ps, 1) if program.ranks > 1 else values
    return cut(program, returns(whole))


CLASS_WEIGHTS = torch.linspace(0.5, 2.0, VOCAB).double()


def by_class(program, product):
    """A mean of losses that weigh by their class, by a product along all rows."""
    weights = CLASS_WEIGHTS[program.labels].reshape(-1)
    return product(weights, program.losses().reshape(-1)) / weights.sum()


def group_dro(program):
    """Group DRO (arXiv 1911.08731), as published: groups weigh by the exponentials of their losses."""
    of_groups = (program.labels.reshape(-1) % 4 == torch.arange(4)[:, None]).double()
    counts = of_groups.sum(1)
    group_losses = of_groups @ program.losses().reshape(-1) / counts
    weights = torch.exp(0.5 * group_losses.detach())
    return group_losses @ (weights / weights.sum())


def doremi(program, means):
    """DoReMi (arXiv 2305.10429): each token weighs by its domain."""
    losses, domains = program.losses(), program.labels % 4
    with torch.no_grad():
        weights = means(program, losses.detach(), domains).softmax(0)
    return (weights[domains] * 4 * losses).mean()


def listed_means(program, losses, domains):
    return torch.tensor([losses[domains == d].mean().item() for d in range(4)]).double()


def means_of_all(program, losses, domains):
    sums = torch.stack([torch.stack([losses[domains == d].sum(), (domains == d).sum()]) for d in range(4)])
    sums = summed_over_ranks(program, sums)
    return sums[:, 0] / sums[:, 1]


def own_share(program):
    """The part of the tokens with a label which are this rank's."""
    here = program.mask.sum()
    return here / summed_over_ranks(program, here.clone())


def labelled(program, **how):
    """Cross entropy of the tokens that count."""
    labels = program.labels.masked_fill(program.mask == 0, -100)
    return F.cross_entropy(program.logits().flatten(0, 1), labels.flatten(), **how)


SHARES = "each row that has a loss weighs 1/"


def told(what, loss_of, message="the loss takes a mean over .* which are this context rank's"):
    return Case(what, by(loss_of), "told", message, ALL)


HEARD = "which are this context rank's|counts otherwise"
CASES = [
    told("a masked mean in torch.compile (eager)", lambda p: compiled("eager")(p.losses(), p.mask), HEARD),
    told("a masked mean in torch.compile (aot_eager)", lambda p: compiled("aot_eager")(p.losses(), p.mask), HEARD),
    told("a masked mean in an autograd.Function", lambda p: MaskedMean.apply(p.losses(), p.mask)),
    told("a masked mean by torch.func.grad_and_value", by_functional, HEARD),
    told("each sequence's masked mean by torch.vmap", lambda p: torch.vmap(masked_mean)(p.losses(), p.mask).mean()),
    told(
        "a masked mean in a reentrant checkpoint",
        lambda p: checkpoint(masked_mean, p.losses(), p.mask, use_reentrant=True),
    ),
    told("a masked mean in torch.jit.trace", lambda p: traced(p.losses(), p.mask)),
    Case("`losses.retain_grad()`, and `losses.grad` before and after backward", by(retained)),
    told("a masked mean by to_sparse()", lambda p: (p.losses() * p.mask).to_sparse().sum() / p.mask.sum()),
    told("a mask over its own sum", lambda p: (p.losses() * (p.mask / p.mask.sum())).sum(), HEARD),
    told("cross entropy whose gradient forward makes (a fused kernel's)", fused),
    Case(
        "`losses.sum() / n`, n a tensor that counts the whole batch (num_items_in_batch)",
        by(lambda p: p.losses().sum() / TOKENS),
        "told",
        "is divided by 32, the number of all ranks' tokens or more",
        "times the context ranks",
    ),
    Case("the same, times the context ranks", by(lambda p: p.losses().sum() / TOKENS * p.ranks)),
    Case(
        "a rank's own mean by its part of all tokens, `cross_entropy(...) * n / N` (TRL, verl)",
        by(lambda p: labelled(p) * own_share(p)),
        "told",
        SHARES,
        "times the context ranks",
    ),
    Case(
        "the same of losses, `losses[mask].mean() * (n / N)`",
        by(lambda p: p.losses()[p.mask > 0].mean() * own_share(p)),
        "told",
        SHARES,
        "times the context ranks",
    ),
    Case("that, times the context ranks", by(lambda p: labelled(p) * own_share(p) * p.ranks)),
    Case(
        "a sum over the tokens that count by the number of all, `sum / labels.numel()` (OLMo)",
        by(lambda p: labelled(p, reduction="sum") / p.labels.numel()),
    ),
    Case("`losses.sum() / n`, n / cp a tensor", by(lambda p: p.losses().sum() / (TOKENS / p.ranks))),
    Case(
        'weights by place, `torch.einsum("bs,s->b", losses, weights)`',
        by(lambda p: torch.einsum("bs,s->b", x := p.losses(), torch.linspace(1, 2, x.shape[1]).to(x)).mean() / S),
        "told",
        "the same on all 2 context ranks",
        '`batch["position_ids"]`',
    ),
    Case(
        "pairs of rows, `(x[:, :, None] - x[:, None]).pow(2).mean()`",
        by(lambda p: ((x := p.losses())[:, :, None] - x[:, None]).pow(2).mean()),
        "told",
        "sub of .* works across rows",
        "all rows by `all_gather`",
    ),
    Case(
        "REINFORCE, `(losses.sum(1) * advantages).mean()`, an advantage for each sequence",
        by(lambda p: (p.losses().sum(1) * torch.tensor([1.0, -0.4])).mean()),
        "told",
        "divided by numbers only",
        "`losses.mean(1)`, or times the context ranks",
    ),
    Case(
        "losses of sequences dropped by `torch.rand(b, 1)` of a seed for each rank",
        by(lambda p: (p.losses() * kept_sequences(p.ps.index("cp"))).mean()),
        "told",
        "one for each sequence, that differ between context ranks",
        "a seed of the data rank",
    ),
    Case(
        "losses of sequences dropped by one seed",
        by(lambda p: (p.losses() * kept_sequences(0)).mean()),
    ),
    Case(
        "`F.kl_div(student, teacher, reduction='batchmean') * T * T` of flat rows",
        by(lambda p: F.kl_div(flat_logs(p) / 2, torch.full((), 1.0 / VOCAB), reduction="batchmean") * 4),
    ),
    Case(
        "`(losses.sum() + squares.sum()) / labels.numel()`",
        by(lambda p: two_sums(p.losses()) / p.labels.numel()),
    ),
    Case(
        "`(losses.sum() + squares.sum()) * (1 / labels.numel())`",
        by(lambda p: two_sums(p.losses()) * (1 / p.labels.numel())),
    ),
    Case(
        "`(losses.sum() + squares.sum()) / n`, n of all ranks' tokens",
        by(lambda p: two_sums(p.losses()) / (2 * S)),
        "told",
        "divided by numbers only",
        "times the context ranks",
    ),
    Case(
        "REINFORCE, times the context ranks",
        by(lambda p: (p.losses().sum(1) * torch.tensor([1.0, -0.4])).mean() * p.ranks),
    ),
    Case(
        "tokens above a percentile of numpy's (Rho-1)",
        by(lambda p: ((x := p.losses()) * (x.detach() > float(np.percentile(x.detach().numpy(), 60)))).mean()),
        "told",
        "Python numbers, or one for each sequence, that differ between context ranks",
        "a threshold of all rows, by `all_gather`",
    ),
    Case(
        "a plain loop without DataParallel",
        without_sums,
        "told",
        "weights differ between the 2 context ranks after an update",
        "`DataParallel(model, ps)`",
    ),
    Case(
        "a Fisher penalty by `torch.autograd.grad`",
        by(lambda p: fisher(p, averages=False)),
        "told",
        "pow of a parameter's gradient",
        "averaged over the ranks before it is squared",
    ),
    Case(
        "a Fisher penalty by `torch.autograd.grad`, averaged",
        by(lambda p: fisher(p, averages=True)),
        elsewhere={"2 tensor x 2 context ranks": ("told", "a penalty on .* counts once on each tensor rank")},
    ),
    told("class weights by `w.view(-1) @ losses.view(-1) / w.sum()`", lambda p: by_class(p, torch.matmul), HEARD),
    told("class weights by `torch.inner(w, losses) / w.sum()`", lambda p: by_class(p, torch.inner), HEARD),
    told("Group DRO, `(groups @ losses.view(-1)) / counts`", group_dro, HEARD),
    Case(
        "weights of domains by a list of `.item()` (DoReMi)",
        by(lambda p: doremi(p, listed_means)),
        "told",
        "numbers of their class .* that differ between context ranks",
        "sums and counts by `all_reduce`",
    ),
    Case("weights of domains by all ranks' sums and counts", by(lambda p: doremi(p, means_of_all))),
    Case(
        "returns of each token by numpy (GAE)",
        by(lambda p: ((x := p.losses()) * returns(x)).mean()),
        "told",
        "values of rows which are this context rank's go to numpy",
        "`gather_from_context_region` before",
    ),
    Case("the same of whole sequences, cut", by(lambda p: ((x := p.losses()) * returns_of_all(p, x)).mean())),
    Case(
        "`F.multi_margin_loss` of logits",
        by(lambda p: F.multi_margin_loss(p.logits().flatten(0, 1), p.labels.flatten())),
    ),
    Case(
        "`F.pairwise_distance(logits, 0).mean()`",
        by(lambda p: F.pairwise_distance(p.logits(), torch.zeros(1)).mean()),
    ),
    told(
        "`F.multi_margin_loss` of the rows that a mask keeps",
        lambda p: F.multi_margin_loss(p.logits()[p.mask.bool()], p.labels[p.mask.bool()]),
        HEARD,
    ),
    Case(
        "a mask of whole sequences that is cut, over all ranks' tokens, in an autograd.Function",
        by(lambda p: MaskedMean.apply(p.losses(), cut(p, torch.ones(2, S).double()))),
    ),
]


def fisher(program, averages):
    """EWC: squared gradients of another batch weigh a penalty."""
    named = [p for p in program.model.parameters() if p.dim() == 1]
    gradients = torch.autograd.grad(program.losses().mean(), named)
    if averages and program.group is not None:
        for g in gradients:
            dist.all_reduce(g, group=program.group.process_group)
            g /= program.ranks
    squares = [g.detach() ** 2 for g in gradients]
    return program.losses().mean() + sum((f * p**2).sum() for f, p in zip(squares, named, strict=True))


def kept_sequences(seed):
    return (torch.rand(2, 1, generator=torch.Generator().manual_seed(7 + seed)) > 0.4).double() / 0.6


def flat_logs(program):
    return program.logits().flatten(0, 1).log_softmax(-1)


def two_sums(losses):
    return losses.sum() + 0.1 * losses.pow(2).sum()


def compiled(backend):
    return torch.compile(masked_mean, backend=backend)


FAMILY = Family(
    "Means over context ranks that no function shows",
    "Sequences over two context ranks, three steps of SGD, compared with one process that computes the same loss.",
    CASES,
    tuple(LAYOUTS),
)
