"""Programs that no table of functions knows: they are called once more on whole sequences, and compared."""

import io
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from core.data_parallel import DataParallel
from core.parallel_state import ContextRows, ParallelState
from tests.models.gpt import gpt
from tests.states import state
from tests.zoo.case import Case, Family, compared
from tests.zoo.context_hooks import steered
from tests.zoo.context_losses import LAYOUTS, Program, by

GRADIENT = "the gradient that a loss gives rows which are this context rank's"
# numbers of detached losses are followed, and compared where they are not
TO_THE_LOSS = f"rows which are this context rank's, not all of a sequence, comes to the loss by|{GRADIENT}"
OTHERS = "has told what is not right on its rows"
HIDDEN = f"{OTHERS}|what a hook on .* makes of hidden states which are this context rank's"
SIZES = "in a number that only this context rank has"
LENGTH = "a number of the length of the rows which are this context rank's"
READ = "over rows which are this context rank.s is read"
IN_HOOK = "in a hook on the gradient of a parameter"
WHOLE = "`gather_from_context_region` before, `ContextRows.of` after"
CLASSES = 3


def told(what, loss_of, says=GRADIENT):
    return Case(what, by(loss_of), "told", says, WHOLE)


def right(what, loss_of):
    return Case(what, by(loss_of))


def weighted(weights_of):
    """The mean of losses times what is made of their values."""

    def loss_of(program):
        losses = program.losses()
        return (losses * weights_of(losses.detach())).mean()

    return loss_of


def places_of_values(x):
    places = x.flatten().unique(return_inverse=True)[1]
    return (1 + places / places.max()).view_as(x)


def later_labels(program):
    """Each row's log-probability of the labels before its own."""
    logits = program.model(program.rows["tokens"], program.rows["position_ids"])
    logp = program.model.gather_logits(logits).log_softmax(-1)
    rows = logp.shape[1]
    labels = program.labels[:, None].expand(len(logp), rows, rows).tril(-1)
    return -(logp * torch.zeros_like(logp).scatter_(2, labels, 1.0)).sum(-1).mean()


def without_gradients(change):
    """A patch of an evaluation's hidden states."""

    def loss_of(program):
        with torch.no_grad():
            steered(change)(program)
        return program.losses().mean()

    return loss_of


def rolled(h, v):
    rows = (torch.arange(h.shape[0]) - 1).clamp(min=0)
    return 0.5 * h + 0.5 * h[rows]


def selected(h, v):
    return h + h.index_select(0, torch.zeros(h.shape[0], dtype=torch.int64))


def copied(h, v):
    h[-2:].copy_(h[:2])
    return h


def on_one_rank(program):
    """Norms for a log of rank 0, as many programs write it."""
    norms = []
    layer = program.model.decoder.layers[0]
    handles = []
    if program.ps.rank == 0:
        handles = [layer.register_forward_hook(lambda module, args, h: norms.append(h.detach().shape))]
    loss = program.losses().mean()
    for handle in handles:
        handle.remove()
    return loss


def probe(loss_of, *, in_evaluation):
    """A head of the program's own on hidden states of a frozen trunk, which a hook kept."""

    def run(variation):
        found = []
        facts, _ = LAYOUTS[variation]
        for ps in (state(**facts), ParallelState.single("cpu")):
            trunk = gpt("llama", parallel=ps).requires_grad_(False)
            torch.manual_seed(3)
            head = nn.Linear(trunk.config.hidden_size, CLASSES).double()
            shard = DataParallel(head, ps, zero_stage=1)
            optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
            kept = []
            trunk.decoder.layers[0].register_forward_hook(lambda module, args, h, kept=kept: kept.append(h))
            for step in range(2):
                program = Program(trunk, ps, step)
                with torch.set_grad_enabled(not in_evaluation):
                    program.losses()
                hidden = kept.pop().detach().transpose(0, 1)
                loss_of(program, head(hidden)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: p.detach().clone() for name, p in head.named_parameters()})
            shard.remove()
        return compared(*found)

    return run


def of_shifted(program, scores):
    return F.cross_entropy(scores[:, :-2].flatten(0, 1), program.labels[:, 2:].flatten() % CLASSES)


def of_masked(program, scores):
    losses = F.cross_entropy(scores.transpose(1, 2), program.labels % CLASSES, reduction="none")
    return (losses * program.mask).sum() / program.mask.sum()


def of_pooled(program, scores):
    return F.cross_entropy(scores.mean(1), torch.arange(len(scores)))


def of_rows(program, scores):
    return F.cross_entropy(scores.flatten(0, 1), program.labels.flatten() % CLASSES)


def evaluated(read):
    """Numbers of an evaluation, which a program reads."""

    def loss_of(program):
        with torch.no_grad():
            logits = program.model.gather_logits(program.model(program.rows["tokens"], program.rows["position_ids"]))
            read(logits, program.labels)
        return program.losses().mean()

    return loss_of


def greedy(logits, labels):
    return [bool(v) for v in (logits.argmax(-1)[:, 6:] == labels[:, 6:]).all(-1)]


def of_continuation(logits, labels):
    logp = logits[:, 9:].log_softmax(-1).gather(-1, labels[:, 9:, None])
    return (logp.sum((1, 2)) - 1).tolist()


def added_up(logits, labels):
    return sum(logits.flatten().tolist())


def saved(logits, labels):
    torch.save((logits.argmax(-1) == labels).sum(1), io.BytesIO())


def counted(program):
    """A mean of torch's, and one that the program takes over all ranks' tokens."""
    losses = program.losses()
    rows = program.total(torch.tensor(float(losses.numel())))
    return losses.mean() + 0.1 * losses.pow(2).sum() / (rows * program.ranks) * program.ranks


def counted_in_place(program):
    """The same, written into."""
    losses = program.losses()
    squares = losses.pow(2).sum()
    squares /= program.total(torch.tensor(float(losses.numel()))) * program.ranks
    squares *= program.ranks
    return losses.mean() + 0.1 * squares


def by_the_world(program):
    """As trainers count tokens: of all ranks, times their number."""
    losses = program.losses()
    rows, ranks = torch.tensor(losses.numel()), 1
    if program.group is not None:
        dist.all_reduce(rows)
        ranks = dist.get_world_size()
    return losses.sum() * ranks / rows.item()


def truncated(program):
    logits, rows = program.logits(), len(program.labels[0])
    return F.cross_entropy(logits[:, :rows].flatten(0, 1), program.labels[:, :rows].flatten())


def filled(h, v):
    """Values for the rows where a mask is set, one after the other."""
    mask = h.detach().norm(dim=-1) > 0.5
    h = h.clone()
    h[mask] = torch.ones(1000, h.shape[2]).double()[: int(mask.sum())]
    return h


def exits_early(of_scores):
    """A logit lens: the model's own norm and output layer on hidden states of a layer within."""

    def loss_of(program):
        model, kept = program.model, []
        handle = model.decoder.layers[0].register_forward_hook(lambda module, args, h: kept.append(h))
        loss = program.losses().mean()
        handle.remove()
        hidden = model.decoder.final_layernorm(kept[0])
        return loss + of_scores(program, hidden.transpose(0, 1))

    return loss_of


def masked_energy(program, hidden):
    return (hidden.pow(2).mean(-1) * program.mask).sum() / program.mask.sum()


def salient(program):
    """How much the scores depend on the embeddings, for a log."""
    kept = []
    handle = program.model.embedding.register_forward_hook(lambda module, args, h: kept.append(h))
    scores = program.logits().logsumexp(-1).mean()
    handle.remove()
    (torch.autograd.grad(scores, kept[0])[0] * kept[0]).sum().item()
    return program.losses().mean()


def between_linears(change):
    """Columns that tensor ranks split, on context ranks as well."""

    def loss_of(program):
        part = program.model.decoder.layers[0].mlp.linear_fc2
        handle = part.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
        loss = program.losses().mean()
        handle.remove()
        return loss

    return loss_of


def logged(read):
    """A number of hidden states that a hook reads while the model is trained."""

    def look(h, v):
        read(h)
        return h

    return steered(look)


def penalized(program):
    """A loss of a hook's, a mean of all rows, whose part is logged as the loss is."""
    kept = []
    handle = program.model.decoder.layers[0].register_forward_hook(lambda module, args, h: kept.append(h))
    loss = program.losses().mean()
    handle.remove()
    penalty = kept[0].pow(2).mean()
    penalty.item()
    return loss + 0.1 * penalty


def with_hooks_on_weights(change):
    def loss_of(program):
        for p in program.model.parameters():
            if not hasattr(p, "is_hooked"):
                p.register_hook(change)
                p.is_hooked = True
        return program.losses().mean()

    return loss_of


def ramped(program):
    """Weights by place, in the shape of the losses."""
    losses = program.losses()
    weights = torch.linspace(0.5, 1.5, losses.shape[1]).double()[None].expand_as(losses)
    return (losses * weights).sum() / weights.sum()


def clamped(gradient):
    return gradient.clamp(-1e-3, 1e-3)


def cut_weights(program, losses):
    weights = torch.rand(2, 16, generator=torch.Generator().manual_seed(program.step)).double()
    return (losses * ContextRows.of_state(program.ps).of(weights, 1)).mean()


CASES = [
    told(
        "pairs compared, `(d[:, None] > d[:, :, None]).sum(2) < n`",
        weighted(lambda d: (d[:, None] > d[:, :, None]).sum(2) < 4),
        TO_THE_LOSS,
    ),
    told(
        "`torch.subtract` of pairs",
        weighted(lambda d: (torch.subtract(d[:, None], d[:, :, None]) > 0).sum(2)),
        TO_THE_LOSS,
    ),
    told("places of losses by `unique(return_inverse=True)`", weighted(places_of_values), TO_THE_LOSS),
    told("`zeros_like(logp).scatter_(2, labels before, 1.)`", later_labels),
    told("a hook, `h[(arange(s) - 1).clamp(min=0)]`", steered(rolled), SIZES),
    told("a hook, `h + h.index_select(0, rows)`", steered(selected), f"{HIDDEN}|{SIZES}"),
    told("a hook, `h + 0.1 * h[[0]]`", steered(lambda h, v: h + 0.1 * h[[0]]), HIDDEN),
    told(
        "a hook without gradients, `torch.cat((0 * h[:1], h[1:]))`",
        without_gradients(lambda h, v: torch.cat((0 * h[:1], h[1:]))),
        HIDDEN,
    ),
    told("a hook without gradients, `h[-2:].copy_(h[:2])`", without_gradients(copied), HIDDEN),
    told("a hook, `h * (1 + 1 / len(h))`", steered(lambda h, v: h * (1 + 1 / len(h))), LENGTH),
    told("a hook, `h + v / math.sqrt(rows)`", steered(lambda h, v: h + v * (3 / h.shape[0] ** 0.5)), LENGTH),
    *(
        Case(f"a head on a {what}, {how}", probe(of, in_evaluation=in_evaluation), "told", "context rank's", WHOLE)
        for what, in_evaluation in (("frozen trunk", False), ("trunk under no_grad", True))
        for how, of in (("labels shifted", of_shifted), ("a masked mean", of_masked), ("pooled", of_pooled))
    ),
    Case("a head on a frozen trunk, by row", probe(of_rows, in_evaluation=False)),
    Case("a head on a trunk under no_grad, by row", probe(of_rows, in_evaluation=True)),
    told(
        "pairs compared, times 2",
        lambda p: 2 * weighted(lambda d: (d[:, None] > d[:, :, None]).sum(2) < 4)(p),
        TO_THE_LOSS,
    ),
    told("a hook, `h[mask] = values[: mask.sum()]`", steered(filled), f"{SIZES}|{HIDDEN}"),
    told("a hook, `h * math.log(h.shape[0])`", steered(lambda h, v: h * math.log(h.shape[0])), LENGTH),
    told(
        "an exact match under no_grad, `[bool(v) for v in (pred[:, 6:] == labels[:, 6:]).all(-1)]`",
        evaluated(greedy),
        READ,
    ),
    told("`logp[:, 9:].sum()` of a continuation under no_grad, read", evaluated(of_continuation), READ),
    told("counts of sequences under no_grad, in a file", evaluated(saved), "over rows which are this context rank's"),
    told("an early exit, a masked mean of the model's own norm", exits_early(masked_energy)),
    right("an early exit, a mean over rows", exits_early(lambda p, h: h.pow(2).mean())),
    told("`(autograd.grad(scores, hidden)[0] * hidden).sum()`, read", salient, "of gradients of rows which are this"),
    told(
        "`sum(losses.flatten().tolist())` under no_grad",
        evaluated(added_up),
        "values of rows",
    ),
    Case(
        "a hook between linears, `x - x.mean(-1)`",
        by(between_linears(lambda x: x - x.mean(-1, keepdim=True))),
        remedy="`gather_from_tensor_region` before",
        elsewhere={"2 tensor x 2 context ranks": ("told", "this tensor rank's columns")},
    ),
    told("a hook's log, `h.norm().item()`", logged(lambda h: h.norm().item()), "is read"),
    told(
        "a hook's log, `h.detach().pow(2).mean().sqrt()`",
        logged(lambda h: (h.detach().pow(2).mean() ** 0.5).item()),
        "is read",
    ),
    told("a hook's log, `(h > 0).sum().item()`", logged(lambda h: (h > 0).sum().item()), "is read"),
    told("`weights.expand_as(losses)` of a `linspace`", ramped, "the same on all 2 context ranks"),
    right("a hook's penalty, a mean, and a log of it", penalized),
    told(
        "`p.register_hook(lambda g: g.clamp(-c, c))`", with_hooks_on_weights(lambda g: g.clamp(-1e-3, 1e-3)), IN_HOOK
    ),
    told("`p.register_hook(lambda g: g / g.norm())`", with_hooks_on_weights(lambda g: g / (1 + g.norm())), IN_HOOK),
    told("`p.register_hook(torch.sign)`", with_hooks_on_weights(lambda g: torch.sign(g)), IN_HOOK),
    right("`p.register_hook(lambda g: 0.5 * g)`", with_hooks_on_weights(lambda g: 0.5 * g)),
    right("a mean of torch's, and one by all ranks' tokens", counted),
    right("the same, `squares *= ranks`", counted_in_place),
    right("`losses.sum() * world_size / n.item()`, n of the world", by_the_world),
    right("`logits[:, :len(labels[0])]`", truncated),
    right("a hook on one rank, for a log", on_one_rank),
    right("a hook, `h.view(len(h), -1, h.shape[2])`", steered(lambda h, v: h.view(len(h), -1, h.shape[2]))),
    right("a hook, `h / h.norm(dim=-1, keepdim=True)`", steered(lambda h, v: h / h.norm(dim=-1, keepdim=True))),
    right("a hook without gradients, `0.9 * h`", without_gradients(lambda h, v: 0.9 * h)),
    right("weights by the values of losses, `sigmoid(d)`", weighted(torch.sigmoid)),
    right("weights that `ContextRows.of` cut", lambda p: cut_weights(p, p.losses())),
    right("a focal weight, `(1 - exp(-d)) ** 2`", weighted(lambda d: (1 - (-d).exp()) ** 2)),
]

FAMILY = Family(
    "Programs repeated on whole sequences",
    "What is called on rows of two context ranks is called on whole sequences as well: one program, or told.",
    CASES,
    tuple(LAYOUTS),
)
