"""What programs make of tokens, labels and masks that context_batch has cut: weights, shifts, counts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from tests.models.gpt import VOCAB, gpt
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.zoo.case import Case, Family, compared
from tests.zoo.context_losses import LAYOUTS, LR, STEPS, S, advantages, batch, by, by_number, cut


def summed_over_ranks(program, n):
    """`n` of all rows, in place."""
    if program.group is not None:
        dist.all_reduce(n, group=program.group.process_group)
    return n


def by_sequence(losses, mask):
    """Each sequence's tokens weigh 1 together."""
    return (losses * mask / mask.sum(1, keepdim=True)).sum(1).mean()


def per_sequence(program):
    return by_sequence(program.losses(), program.mask)


def per_sequence_of_all(program):
    lengths = summed_over_ranks(program, program.mask.sum(1, keepdim=True))
    return (program.losses() * program.mask / lengths).sum(1).mean() * program.ranks


def backward_with(weights_of):
    """`losses.backward(weights)`, as a loss whose backward that is."""

    class Weighted:
        def __init__(self, program):
            self.losses, self.weights = program.losses(), weights_of(program)

        def backward(self):
            self.losses.backward(self.weights)

    return Weighted


def next_but_one(program):
    labels = program.labels.roll(-1, 1)
    return F.cross_entropy(program.logits().flatten(0, 1), labels.flatten())


def next_but_one_before(program):
    """The same, shifted before the batch is cut."""
    whole = batch(program.step, ParallelState.single("cpu"))
    labels = cut(program, whole["labels"].roll(-1, 1))
    return F.cross_entropy(program.logits().flatten(0, 1), labels.flatten())


def sampled(program):
    """Scheduled sampling: the model's own tokens, one place on."""
    tokens = program.rows["tokens"].clone()
    with torch.no_grad():
        own = program.model.gather_logits(program.model(tokens, program.rows["position_ids"])).argmax(-1)
    tokens[:, 1:] = own[:, :-1]
    return program.model(tokens, program.rows["position_ids"], labels=program.labels).mean()


def rare_weigh_more(program):
    counts = torch.bincount(program.labels.flatten(), minlength=VOCAB).double()
    return (program.losses() / counts[program.labels]).mean()


def rare_by_table(program):
    """From numbers of the whole corpus."""
    table = 1.0 / (1 + torch.arange(VOCAB).double())
    return (program.losses() * table[program.labels]).mean()


def returns(program):
    """Discounted, from the last token to the first."""
    rewards = program.mask.flip(1).cumsum(1).flip(1)
    return (program.losses() * rewards).mean()


def returns_in_a_loop(program):
    running, found = torch.zeros(2, dtype=torch.float64), []
    for place in reversed(range(program.mask.shape[1])):
        running = program.mask[:, place] + 0.9 * running
        found.insert(0, running)
    return (program.losses() * torch.stack(found, 1)).mean()


def after_separator(program):
    kept = ((program.rows["tokens"] < 6).cumsum(1) > 0).double()
    return (program.losses() * (1 + kept)).mean()


def by_kind(program):
    """Tokens of one kind weigh double."""
    return (program.losses() * torch.where(program.rows["tokens"] % 3 == 0, 2.0, 1.0)).mean()


def counted_and_read(program):
    """What a loop logs of its batch."""
    kept = int(program.mask.sum())
    longest = program.mask.sum(1).max().item()
    text = f"{kept} tokens, longest {longest:.0f}, {program.labels.unique().numel()} kinds"
    assert text
    return program.losses().mean()


def listed(program):
    """A text of it, say."""
    assert program.rows["tokens"].tolist()
    return program.losses().mean()


def halves_by_position(program):
    """The second half of each sequence alone, by the rows' own positions."""
    kept = (program.rows["position_ids"] >= S // 2).double()
    return (program.losses() * kept).mean()


def told(what, loss_of, says="of a batch's rows which are this context rank's"):
    return Case(what, by(loss_of), "told", says, "make it of whole sequences, before `context_batch`")


def summed(what, loss_of, says):
    return Case(what, by(loss_of), "told", says, "sum over the context ranks first")


def stepped(loss_fn):
    """Weights after some steps of an executor: of context ranks, and of one process."""

    def run(variation):
        found = []
        facts, stage = LAYOUTS[variation]
        for ps in (state(**facts), ParallelState.single("cpu")):
            model = gpt("llama", parallel=ps)
            shard = DataParallel(model, ps, zero_stage=stage)
            optimizer = ShardedSGD(shard, OptimizerConfig(lr=LR, clip_grad=0.0, weight_decay=0.0))
            executor = SingleStage(model, ps=ps, num_microbatches=2, grad_sync=shard)
            for step in range(STEPS):
                result = executor.step(batch(step, ps), loss_fn)
                optimizer.step(num_tokens=result.num_tokens)
                optimizer.zero_grad()
            shard.remove()
            found.append(whole_parameters(model, ps))
        return compared(*found)

    return run


def told_of_steps(what, loss_fn, says="of a batch's rows which are this context rank's"):
    return Case(what, stepped(loss_fn), "told", says, "count tokens, or means of sequences")


def shifted_mask(losses, rows):
    mask = rows["loss_mask"].roll(1, 1)
    return (losses * mask).sum(), mask.sum()


def focal(losses, rows):
    return ((1 - (-losses.detach()).exp()) ** 2 * losses).sum(), losses.numel()


def masked_by_chance(program, cuts):
    """Other tokens in the place of some, as BERT's."""
    draw = torch.Generator().manual_seed(program.step)
    tokens = program.rows["tokens"]
    kept = (
        cut(program, torch.rand(2, S, generator=draw) > 0.3)
        if cuts
        else torch.rand(tokens.shape, generator=draw) > 0.3
    )
    return program.model(torch.where(kept, tokens, 0), program.rows["position_ids"], labels=program.labels).mean()


def by_gradient(change, register=lambda layer, hook: layer.register_full_backward_hook(hook)):
    """The gradient that goes into a layer's backward, or comes of it, is another."""

    def loss_of(program):
        handle = register(program.model.decoder.layers[1], lambda module, into, of: (change(into[0]), *into[1:]))
        loss = program.losses().mean()
        return _Then(loss, handle.remove)

    return loss_of


class _Then:
    """A loss, and what is done after its backward."""

    def __init__(self, loss, after):
        self.loss, self.after = loss, after

    def backward(self):
        self.loss.backward()
        self.after()


def clipped(gradient):
    return gradient * min(1.0, 0.01 / gradient.norm().item())


def adversarial(norm):
    """FreeLB's step: embeddings, and a little of their gradient."""

    def loss_of(program):
        kept = []
        hook = program.model.embedding.register_forward_hook(lambda module, args, out: kept.append(out))
        (gradient,) = torch.autograd.grad(program.losses().mean(), kept[0])
        hook.remove()
        step = 0.3 * gradient / norm(gradient)
        hook = program.model.embedding.register_forward_hook(lambda module, args, out: out + step.detach())
        loss = program.losses().mean()
        hook.remove()
        return loss

    return loss_of


def in_the_third(loss_of):
    """Another loss in every third step only."""
    return lambda p: loss_of(p) if p.step % 3 == 2 else p.losses().mean()


def hardest(means_of, choose):
    """The losses of the sequence that has the largest mean."""

    def loss_of(program):
        losses = program.losses()
        return losses[choose(means_of(program, losses.detach()))].mean()

    return loss_of


def own_means(program, losses):
    return losses.mean(1)


def whole_means(program, losses):
    return summed_over_ranks(program, losses.mean(1))


def first_by_list(means):
    means = means.tolist()
    return [0] if means[0] > means[1] else [1]


def by_influence(sum_of):
    """Sequences weigh by the products of their gradients, as LESS and TracIn select data."""

    def loss_of(program):
        logits, labels = program.logits().flatten(0, 1), program.labels.flatten()
        losses = F.cross_entropy(logits, labels, reduction="none").view(program.labels.shape)
        head = program.model.decoder.final_layernorm.weight
        of_each = [torch.autograd.grad(x.mean(), head, retain_graph=True)[0].detach() for x in losses]
        if sum_of is not None:
            of_each = [sum_of(program, gradient) / program.ranks for gradient in of_each]
        weights = torch.stack([(gradient * sum(of_each)).sum() for gradient in of_each])
        return (losses.mean(1) * weights / weights.sum()).sum()

    return loss_of


def with_positions(of_positions):
    return lambda p: p.model(p.rows["tokens"], of_positions(p.rows["position_ids"]), labels=p.labels).mean()


CUT_WEIGHTS = {
    "softmax": lambda a: torch.softmax(a.flatten(), 0).view_as(a) * a.numel(),
    "layer_norm": lambda a: F.layer_norm(a, a.shape),
    "a row centred": lambda a: a - a.mean(1, keepdim=True),
    "a threshold": lambda a: (a.std(1, keepdim=True) > 0.9).double(),
}


CASES = [
    *[
        Case(
            f"{what} of advantages that were cut",
            by(lambda p, weigh=weigh: (p.losses() * weigh(cut(p, advantages(p)))).mean()),
            "told",
            "of a batch's rows which are this context rank's",
            "`ContextRows.of_state(ps).of(weights, 1)` of what was made of whole sequences",
        )
        for what, weigh in CUT_WEIGHTS.items()
    ],
    Case(
        "advantages that are cut, clipped and masked by row",
        by(lambda p: (p.losses() * cut(p, advantages(p)).clamp(-1, 1).mul(2).tanh().abs()).mean()),
    ),
    summed(
        "a mean's square in every third step",
        in_the_third(lambda p: p.losses().mean() ** 2),
        "counts otherwise",
    ),
    Case(
        "the square of the mean over all ranks",
        by(in_the_third(lambda p: (p.whole(p.losses().mean()) / p.ranks) ** 2)),
    ),
    summed(
        "the hardest sequence, `means.topk(1).indices`",
        hardest(own_means, lambda x: x.topk(1).indices),
        "comes to the loss by getitem",
    ),
    summed(
        "`torch.argsort(means)[-1:]`",
        hardest(own_means, lambda x: torch.argsort(x)[-1:]),
        "comes to the loss by getitem",
    ),
    summed("by `means.tolist()`", hardest(own_means, first_by_list), "is compared"),
    summed("by `means.numpy()`", hardest(own_means, lambda x: [int(x.numpy().argmax())]), "is read"),
    Case("the same, means summed over the context ranks", by(hardest(whole_means, lambda x: x.topk(1).indices))),
    Case("by a list of means of all ranks", by(hardest(whole_means, first_by_list))),
    told("positions from 0, `p - p[:, :1]`, after `context_batch`", with_positions(lambda p: p - p[:, :1])),
    told("`p - p.min(1, keepdim=True).values`", with_positions(lambda p: p - p.min(1, keepdim=True).values)),
    Case("positions halved", by(with_positions(lambda p: p // 2))),
    summed("sequences weighted by products of their gradients", by_influence(None), "counts otherwise"),
    Case(
        "the same, gradients summed over the context ranks",
        by(by_influence(summed_over_ranks)),
        elsewhere={"2 context ranks, ZeRO-3": ("told", "outside of its module's forward")},
    ),
    told(
        "tokens masked by chance after `context_batch`, with one seed",
        lambda p: masked_by_chance(p, False),
        "drawn with one seed, all draw alike",
    ),
    Case("the same mask, drawn for whole sequences and cut", by(lambda p: masked_by_chance(p, True))),
    told("weights `mask / mask.sum(1, keepdim=True)`, sequences weigh alike", per_sequence),
    Case("the same, `mask.sum(1)` summed over the context ranks", by(per_sequence_of_all)),
    told("`losses.backward(mask / mask.sum())`", backward_with(lambda p: p.mask / p.mask.sum())),
    Case(
        "`losses.backward(torch.full_like(losses, 1 / n))`",
        by(backward_with(lambda p: torch.full((2, S // p.ranks), p.ranks / (2 * S)).double())),
    ),
    told("labels of the next token but one, `labels.roll(-1, 1)`", next_but_one),
    Case("the same, rolled before `context_batch`", by(next_but_one_before)),
    told("scheduled sampling: `tokens[:, 1:] = own[:, :-1]`", sampled, "takes rows of a batch by number"),
    told("weights by `bincount` of the batch's labels", rare_weigh_more),
    Case("weights by a table of the corpus, `table[labels]`", by(rare_by_table)),
    told("returns, `rewards.flip(1).cumsum(1).flip(1)`", returns),
    told("returns in a Python loop over places", returns_in_a_loop),
    told("a mask after a separator, `(tokens == sep).cumsum(1) > 0`", after_separator),
    told(
        "the first token of each row, `tokens == tokens[:, :1]`",
        lambda p: (p.losses() * (p.rows["tokens"] == p.rows["tokens"][:, :1]).double()).mean() + p.losses().mean(),
    ),
    Case("weights by kind of token, `torch.where(tokens % 3 == 0, 2, 1)`", by(by_kind)),
    Case("counts of the batch that are logged", by(counted_and_read)),
    told("`tokens.tolist()`, for a log", listed),
    Case("the second half by `position_ids >= s / 2`", by(halves_by_position)),
    Case(
        "executors: token sums and counts, `(losses * mask).sum(), mask.sum()`",
        stepped(lambda x, rows: ((x * rows["loss_mask"]).sum(), rows["loss_mask"].sum())),
    ),
    Case("executors: a focal loss, over its rows", stepped(focal)),
    Case("executors: `losses.mean(), 1`", stepped(lambda losses, rows: (losses.mean(), 1))),
    told_of_steps(
        "executors: `losses.sum(), len(losses)`", lambda losses, rows: (losses.sum(), len(losses)), "counts no rows"
    ),
    told_of_steps("executors: a mask that is rolled", shifted_mask),
    told_of_steps(
        "executors: weights `mask / mask.sum(1, keepdim=True)`",
        lambda x, rows: ((x * (m := rows["loss_mask"]) / m.sum(1, keepdim=True)).sum(), len(x)),
    ),
    by_number("`register_full_backward_hook` that clips by `g.norm()`", by_gradient(clipped)),
    Case("the same hook, `0.5 * g`", by(by_gradient(lambda g: 0.5 * g))),
    by_number(
        "an adversarial step, `g / g.norm()` of `torch.autograd.grad(loss, h)` (FreeLB)", adversarial(torch.norm)
    ),
    Case("the same by token, `g / g.norm(dim=-1)`", by(adversarial(lambda g: g.norm(dim=-1, keepdim=True)))),
]

FAMILY = Family(
    "Batches and gradients over context ranks",
    "What is made of tokens, labels and masks, and of gradients of rows, on two context ranks, as on one.",
    CASES,
    tuple(LAYOUTS),
)
