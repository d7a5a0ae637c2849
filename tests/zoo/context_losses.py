"""Losses that programs compute themselves from a model whose sequences lie over context ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ContextRows, ParallelState, context_batch
from tests.models.gpt import VOCAB, gpt
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.zoo.case import Case, Family, compared

LR, STEPS, S = 0.05, 3, 16
LAYOUTS = {  # facts of the ranks, ZeRO stage
    "2 context ranks, ZeRO-1": ({"cp": 2}, 1),
    "2 context ranks, ZeRO-3": ({"cp": 2}, 3),
    "2 tensor x 2 context ranks": ({"cp": 2, "tp": 2}, 1),
}
CLASSES = torch.tensor([1, 2])


def batch(step, ps):
    """Rows of two sequences; the mask keeps other numbers of tokens on each rank."""
    tokens, labels = torch.randint(VOCAB, (2, 2, S), generator=torch.Generator().manual_seed(step))
    mask = torch.rand(2, S, generator=torch.Generator().manual_seed(step + 9)).gt(0.6).double()
    mask[:, 0] = 1.0
    given = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": torch.arange(S).expand(2, -1)}
    return context_batch(given, ps)


class Program:
    """What a loop has at hand in one step."""

    def __init__(self, model, ps, step):
        self.group, self.ranks = ps.group("cp"), ps.size("cp")
        self.rows, self.model, self.ps, self.step = batch(step, ps), model, ps, step
        self.mask, self.labels = self.rows["loss_mask"], self.rows["labels"]

    def losses(self):
        return self.model(self.rows["tokens"], self.rows["position_ids"], labels=self.labels)

    def logits(self):
        return self.model.gather_logits(self.model(self.rows["tokens"], self.rows["position_ids"]))

    def total(self, n):
        """`n` of all ranks, as it divides a loss that DataParallel averages."""
        n = n.clone()
        if self.group is not None:
            dist.all_reduce(n, group=self.group.process_group)
        return n / self.ranks

    def whole(self, x):
        """A sum over all rows, with gradients."""
        return x if self.group is None else all_reduce(x, group=self.group.process_group)


def by(loss_of):
    """Weights after some steps: of context ranks, and of one process."""

    def run(variation):
        found = []
        facts, stage = LAYOUTS[variation]
        for ps in (state(**facts), ParallelState.single("cpu")):
            model = gpt("llama", parallel=ps)
            shard = DataParallel(model, ps, zero_stage=stage)
            optimizer = ShardedSGD(shard, OptimizerConfig(lr=LR, clip_grad=0.0, weight_decay=0.0))
            for step in range(STEPS):
                loss_of(Program(model, ps, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            shard.remove()
            found.append(whole_parameters(model, ps))
        return compared(*found)

    return run


def weighted(program, divisor):
    weights = 1.0 / (1 + program.rows["position_ids"])
    return (program.losses() * weights).sum() / divisor(weights.sum())


def selected(program):
    kept = program.mask.bool()
    return F.cross_entropy(program.logits()[kept], program.labels[kept], reduction="sum") / program.total(
        program.mask.sum()
    )


def preferred(program, whole):
    """The first sequence over the second, by their tokens' log-probabilities."""
    labels = program.labels[..., None]
    chosen = program.logits().log_softmax(-1).gather(-1, labels).squeeze(-1)
    scores = whole((chosen * program.mask).sum(1))
    return -F.logsigmoid(0.1 * (scores[0] - scores[1]))


def hooked(of_hidden, part=lambda model: model.decoder.layers[0]):
    """The mean of the losses, and what is made of the hidden states that a forward hook was given."""

    def loss_of(program):
        kept = []
        handle = part(program.model).register_forward_hook(lambda module, args, output: kept.append(output))
        loss = program.losses().mean()
        handle.remove()
        return loss + of_hidden(program, kept[0])

    return loss_of


def from_zero(program):
    """The rows' own positions are left out."""
    tokens = program.rows["tokens"]
    return program.model(tokens, torch.arange(tokens.shape[1]).expand(2, -1), labels=program.labels).mean()


def in_halves(program):
    """The first half of each sequence on one rank, the second on the other."""
    whole = batch(program.step, ParallelState.single("cpu"))
    rank = program.ps.coordinate["cp"]
    tokens, labels, positions = (
        whole[name].chunk(program.ranks, 1)[rank] for name in ("tokens", "labels", "position_ids")
    )
    return program.model(tokens, positions, labels=labels).mean()


def noisy(draw):
    """Noise on the embeddings, as NEFTune adds it."""

    def loss_of(program):
        hook = program.model.embedding.register_forward_hook(lambda module, args, out: out + draw(program, out))
        loss = program.losses().mean()
        hook.remove()
        return loss

    return loss_of


def neftune(program, out):
    bound = 5 / (out.size(0) * out.size(2)) ** 0.5
    return torch.zeros_like(out).uniform_(-bound, bound)


def cut_noise(program, out):
    noise = torch.randn(S, 2, out.shape[-1], generator=torch.Generator().manual_seed(program.step)).to(out)
    return ContextRows.of_state(program.ps).of(noise, 0) if program.ranks > 1 else noise


def advantages(program):
    return torch.randn(2, S, generator=torch.Generator().manual_seed(program.step)).double().cumsum(1)


def cut(program, x):
    return ContextRows.of_state(program.ps).of(x, 1) if program.ranks > 1 else x


def whitened(x):
    return (x - x.mean()) / x.std()


def adapted(program):
    """A multiplier that follows the loss (adaptive KL, dual ascent)."""
    losses = program.losses()
    penalty = 0.1 * (losses - 3.7).square()
    found = float(penalty.detach().mean())
    return (losses + (0.1 + found) * penalty).mean()


def last_norm(model):
    return model.decoder.final_layernorm


def logged(losses):
    """Of this rank's rows."""
    assert float(losses.max()) > 0
    return losses.mean()


def guarded(program, decided):
    """A spike's loss counts less."""
    loss = program.losses().mean()
    if decided(program, loss) > 3.0:
        loss = loss * 0.1
    return loss


def mean_of_ranks(program, loss):
    mean = loss.detach().clone()
    if program.group is not None:
        dist.all_reduce(mean, group=program.group.process_group)
    return mean.item() / program.ranks


def evaluated(of):
    """A number of an evaluation before the step, which is compared too."""

    def loss_of(program):
        with torch.no_grad():
            program.found = of(program, program.losses())
        return program.losses().mean()

    return loss_of


def perplexity(program, losses):
    return (losses.sum() / losses.numel()).exp().item()


def perplexity_of_all(program, losses):
    total = losses.sum()
    if program.group is not None:
        dist.all_reduce(total, group=program.group.process_group)
    return (total / (2 * S)).exp().item()


def logged_of_all(program):
    losses = program.losses()
    largest = losses.detach().max()
    if program.group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=program.group.process_group)
    assert float(largest) > 0
    return losses.mean()


def told(what, loss_of, remedy="`all_reduce(n, group=get_data_parallel_group(with_context_parallel=True))`"):
    return Case(what, by(loss_of), "told", "counts otherwise than the same sum of another", remedy)


def by_number(what, loss_of):
    return Case(what, by(loss_of), "told", "which are this context rank's", "`all_reduce(x)` of what one rank has")


def by_constant(what, loss_of):
    return Case(what, by(loss_of), "told", "divided by numbers only", "`losses.mean()`, or times the context ranks")


CASES = [
    Case("`losses.mean()`", by(lambda p: p.losses().mean())),
    Case("`losses.sum() / losses.numel()`", by(lambda p: (losses := p.losses()).sum() / losses.numel())),
    Case("`losses.sum() * cp / (b * s)`", by(lambda p: p.losses().sum() * p.ranks / (2 * S))),
    by_constant("`losses.sum() / b`", lambda p: p.losses().sum() / 2),
    by_constant("`losses.sum() / (b * s)`", lambda p: p.losses().sum() / (2 * S)),
    by_constant("a mean of sequences' sums, `losses.sum(1).mean()`", lambda p: p.losses().sum(1).mean()),
    by_constant(
        "Dr. GRPO, `(losses * mask * advantages).sum(-1) / MAX` and its mean",
        lambda p: ((p.losses() * p.mask * torch.tensor([[1.0], [-0.5]])).sum(-1) / S).mean(),
    ),
    Case("`losses.sum(1) / losses.numel()` and its sum", by(lambda p: ((x := p.losses()).sum(1) / x.numel()).sum())),
    by_constant(
        "`F.cross_entropy(..., reduction='sum') / b`",
        lambda p: F.cross_entropy(p.logits().flatten(0, 1), p.labels.flatten(), reduction="sum") / 2,
    ),
    Case("a masked sum over all ranks' tokens", by(lambda p: (p.losses() * p.mask).sum() / p.total(p.mask.sum()))),
    Case("weights by position, over all ranks' sum", by(lambda p: weighted(p, p.total))),
    Case("selected logits, over all ranks' tokens", by(selected)),
    Case(
        "cross entropy and z-loss of logits",
        by(
            lambda p: (
                F.cross_entropy((x := p.logits()).flatten(0, 1), p.labels.flatten())
                + 1e-3 * (x.logsumexp(-1) ** 2).mean()
            )
        ),
    ),
    Case(
        "logits pooled over the sequence, summed over the ranks",
        by(lambda p: F.cross_entropy(p.whole(p.logits().sum(1)) / S, CLASSES)),
    ),
    told("`(losses * mask).sum() / mask.sum()`", lambda p: (p.losses() * p.mask).sum() / p.mask.sum()),
    told("`... / mask.sum().item()`", lambda p: (p.losses() * p.mask).sum() / p.mask.sum().item()),
    told("`losses[mask.bool()].mean()`", lambda p: p.losses()[p.mask.bool()].mean()),
    told("a mean weighted by position", lambda p: weighted(p, lambda total: total)),
    told(
        "cross entropy of one's own, labels of -100",
        lambda p: F.cross_entropy(p.logits().flatten(0, 1), p.labels.masked_fill(p.mask == 0, -100).flatten()),
    ),
    told(
        "logits pooled over the rows at hand",
        lambda p: F.cross_entropy(p.logits().mean(1), CLASSES),
        "`all_reduce(x)`",
    ),
    told("a loss squared", lambda p: p.losses().mean() ** 2, "`all_reduce(x)`"),
    by_number(
        "a baseline, `losses - losses.detach().mean()`",
        lambda p: F.relu((losses := p.losses()) - losses.detach().mean()).mean(),
    ),
    told("preferences (DPO) of the rows at hand", lambda p: preferred(p, lambda x: x), "`all_reduce(x)`"),
    Case("preferences (DPO), summed over the ranks first", by(lambda p: preferred(p, p.whole))),
    by_number("the last token's logits", lambda p: F.cross_entropy(p.logits()[:, -1], CLASSES)),
    by_number("losses without the last, `losses[:, :-1]`", lambda p: p.losses()[:, :-1].mean()),
    Case(
        "weights by place, `losses * torch.arange(losses.shape[1])`",
        by(lambda p: ((losses := p.losses()) * torch.arange(losses.shape[1])).mean()),
        "told",
        "the same on all 2 context ranks",
        '`batch["position_ids"]`',
    ),
    told(
        "a layer's hidden states by a forward hook, pooled: `h.mean(0)`",
        hooked(lambda p, h: F.cross_entropy(h.mean(0), CLASSES)),
        "`all_reduce(x)`",
    ),
    told("a hook on the norm, `h.mean() ** 2`", hooked(lambda p, h: h.mean() ** 2, last_norm), "`all_reduce(x)`"),
    by_number(
        "a hook, differences of neighbours: `h[1:] - h[:-1]`", hooked(lambda p, h: (h[1:] - h[:-1]).square().mean())
    ),
    Case("a hook, a penalty `0.1 * h.pow(2).mean()`", by(hooked(lambda p, h: 0.1 * h.pow(2).mean()))),
    Case("a hook, `0.1 * h.pow(2).sum() / h.numel()`", by(hooked(lambda p, h: 0.1 * h.pow(2).sum() / h.numel()))),
    Case(
        "a hook, pooled over all ranks",
        by(hooked(lambda p, h: F.cross_entropy(p.whole(h.sum(0)) / S, CLASSES), last_norm)),
    ),
    Case(
        "a logged `losses.max()`, `.min()`, `.argmax()`, a quantile",
        by(lambda p: logged(p.losses())),
        "told",
        "max of rows which are this context rank's is read",
        "`all_reduce(x, op=ReduceOp.MAX)` before",
    ),
    Case("a logged `losses.max()` of all ranks", by(logged_of_all)),
    by_number("a perplexity under `no_grad`, `(losses.sum() / n).exp().item()`", evaluated(perplexity)),
    Case("a perplexity of all ranks", by(evaluated(perplexity_of_all))),
    Case(
        "`if loss.item() > t: loss *= 0.1`",
        by(lambda p: guarded(p, lambda p, loss: loss.item())),
        "told",
        "is compared",
        "`all_reduce` of `loss.detach()` before",
    ),
    Case(
        "`if loss.detach() > t:`",
        by(lambda p: guarded(p, lambda p, loss: loss.detach())),
        "told",
        "is compared",
        "`all_reduce` of `loss.detach()` before",
    ),
    Case(
        "a multiplier made of `float(penalty.mean())`",
        by(adapted),
        "told",
        "Python numbers, or one for each sequence, that differ between context ranks",
        "`all_reduce` before",
    ),
    Case("the same by all ranks' mean", by(lambda p: guarded(p, mean_of_ranks))),
    Case(
        "`position_ids` of 0 to s/cp - 1 on every rank",
        by(from_zero),
        "told",
        "the same on all 2 context ranks.*context_batch",
        "`context_batch`",
    ),
    Case(
        "sequences cut into halves by hand",
        by(in_halves),
        "told",
        "consecutive rows on rank.*context_batch",
        "`context_batch`",
    ),
    by_number("the largest loss", lambda p: p.losses().max()),
    Case(
        "a hook that adds noise drawn like the embeddings (NEFTune)",
        by(noisy(neftune)),
        "told",
        "uniform.? draws for .*this context rank's",
        "`ContextRows.of_state(ps).of(noise, 0)`",
    ),
    Case(
        "`F.dropout` of what a hook is given",
        by(hooked(lambda p, h: F.dropout(h, 0.5).pow(2).mean())),
        "told",
        "dropout draws for .*this context rank's",
        "`ContextRows.of_state(ps).of(mask, 0)`",
    ),
    Case("noise drawn for whole sequences and cut", by(noisy(cut_noise))),
    Case(
        "advantages whitened by a rank's own rows",
        by(lambda p: (p.losses() * whitened(cut(p, advantages(p)))).mean()),
        "told",
        "of a batch's rows which are this context rank's",
        "`ContextRows.of_state(ps).of(advantages, 1)`",
    ),
    Case(
        "advantages whitened before they are cut",
        by(lambda p: (p.losses() * cut(p, whitened(advantages(p)))).mean()),
    ),
]

FAMILY = Family(
    "Losses over context ranks",
    "Sequences over two context ranks, three steps of SGD, compared with one process that computes the same loss.",
    CASES,
    tuple(LAYOUTS),
)
