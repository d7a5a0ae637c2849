"""What is made of rows over context ranks without gradients: a teacher's targets, statistics of a calibration."""

import torch
import torch.nn.functional as F

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from tests.models.gpt import VOCAB, gpt
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.zoo.case import Case, Family, compared
from tests.zoo.context_losses import LAYOUTS, LR, STEPS, Program, by, hooked

TOLD = "context rank's, not all of a sequence, comes to the loss by|of mean 0 on each of 2 context ranks"
SUMMED = "`all_reduce` of the statistic over the context ranks before"


def taught(target_of):
    """The squared distance to what is made of a teacher's logits [b, s/cp, v]."""

    def loss_of(program):
        with torch.no_grad():
            teacher = gpt("llama", parallel=program.ps)
            out = teacher(program.rows["tokens"], program.rows["position_ids"])
            target = target_of(program, teacher.gather_logits(out))
        return program.logits().sub(target).square().mean()

    return loss_of


def taught_inside(target_of):
    """The same of hidden states [s/cp, b, h], by a teacher without a head."""

    def loss_of(program):
        with torch.no_grad():
            teacher = gpt("llama", parallel=program.ps, post_process=False)
            hidden = teacher(program.rows["tokens"], program.rows["position_ids"])
            target = target_of(program, hidden)
        return hooked(lambda p, student: F.smooth_l1_loss(student, target))(program)

    return loss_of


def distilled(loss_of_pair):
    """A divergence from a teacher, of logits over a temperature of 2."""

    def loss_of(program):
        with torch.no_grad():
            teacher = gpt("llama", parallel=program.ps)
            out = teacher.gather_logits(teacher(program.rows["tokens"], program.rows["position_ids"]))
        return loss_of_pair((program.logits() / 2).log_softmax(-1), (out / 2).log_softmax(-1)) / 40

    return loss_of


def valued(target_of):
    """A critic's squared distance to targets that are made of its own values along the sequence."""

    def loss_of(program):
        values = program.logits()[..., 0]
        with torch.no_grad():
            target = target_of(values.detach())
        return (values - target).square().mean()

    return loss_of


def confident(x, q):
    """A mean weighted by the teacher's confidence."""
    weights = q.exp().amax(-1)
    return (weights * (q.exp() * (q - x)).sum(-1)).sum() / weights.sum()


def normed(program, hidden):
    """Over time, as data2vec does."""
    return F.instance_norm(hidden.permute(1, 2, 0)).permute(2, 0, 1)


def calibrated(statistic_of):
    """Weights that are scaled by statistics of what a hook is given, then `DataParallel` and training."""

    def run(variation):
        found = []
        facts, stage = LAYOUTS[variation]
        for ps in (state(**facts), ParallelState.single("cpu")):
            model = gpt("llama", parallel=ps)
            program, kept = Program(model, ps, 7), []
            layer = model.decoder.layers[0]
            handle = layer.register_forward_pre_hook(lambda module, inputs, kept=kept: kept.append(inputs[0]))
            with torch.no_grad():
                program.losses()
                handle.remove()
                scale = statistic_of(program, kept[0])
                layer.input_layernorm.weight.data.mul_(1 + scale)
            shard = DataParallel(model, ps, zero_stage=stage)
            optimizer = ShardedSGD(shard, OptimizerConfig(lr=LR, clip_grad=0.0, weight_decay=0.0))
            for step in range(STEPS):
                Program(model, ps, step).losses().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            shard.remove()
            found.append(whole_parameters(model, ps))
        return compared(*found)

    return run


def energy(program, hidden):
    """[h], of all rows that a rank has."""
    return hidden.square().mean((0, 1))


HALVED = "divided by numbers only"
TIMES = "times the context ranks, or a mean over tokens"


def own_tokens(change):
    """Scheduled sampling: `change(tokens, own)` is given to the model."""

    def loss_of(program):
        tokens, places = program.rows["tokens"], program.rows["position_ids"]
        with torch.no_grad():
            own = program.model.gather_logits(program.model(tokens, places)).argmax(-1)
        return program.model(change(tokens, own), places, labels=program.labels).mean()

    return loss_of


def own_in_training(change):
    """The same of a forward with gradients, whose logits are gone by then."""

    def loss_of(program):
        tokens, places = program.rows["tokens"], program.rows["position_ids"]
        own = change(program.model.gather_logits(program.model(tokens, places)).argmax(-1))
        return program.model(own, places, labels=program.labels).mean()

    return loss_of


def every_third(own):
    return torch.arange(own.shape[1]).expand_as(own) % 3 == 2


def of_places(what, loss_of, says):
    return Case(what, by(loss_of), "told", says, "make it of whole sequences, before `context_batch`")


CASES = [
    of_places(
        "scheduled sampling: `cat((tokens[:, :1], own[:, :-1]), 1)`",
        own_tokens(lambda tokens, own: torch.cat((tokens[:, :1], own[:, :-1]), 1)),
        "is given to the model",
    ),
    of_places(
        "scheduled sampling: `own.roll(1, 1)`",
        own_tokens(lambda tokens, own: own.roll(1, 1)),
        "roll of a batch's rows.*is given to the model",
    ),
    of_places(
        "scheduled sampling: every third token by `torch.arange`",
        own_tokens(lambda tokens, own: torch.where(every_third(own), own, tokens)),
        "the same on all 2 context ranks",
    ),
    of_places(
        "own tokens of a forward with gradients, rolled",
        own_in_training(lambda own: own.roll(1, 1)),
        "roll of a batch's rows.*is given to the model",
    ),
    Case("own tokens of a forward with gradients", by(own_in_training(lambda own: own))),
    Case(
        "self-training: own tokens where they are above a number",
        by(own_tokens(lambda tokens, own: torch.where(own > VOCAB // 2, own, tokens))),
    ),
    Case(
        "distillation by `kl_div(..., reduction='batchmean') * T * T`, T = 2",
        by(distilled(lambda x, q: F.kl_div(x, q.exp(), reduction="batchmean") * 2.0 * 2.0)),
        "told",
        HALVED,
        TIMES,
    ),
    Case(
        "distillation, each sequence's sum and their mean",
        by(distilled(lambda x, q: (q.exp() * (q - x)).sum((1, 2)).mean())),
        "told",
        HALVED,
        TIMES,
    ),
    Case(
        "distillation, weighted by the teacher's confidence over its own sum",
        by(distilled(confident)),
        "told",
        "counts otherwise than the same sum of another",
        SUMMED,
    ),
    Case(
        "a critic's targets by the next token's value, `v[:, 1:]`",
        by(valued(lambda v: 0.9 * F.pad(v[:, 1:], (0, 1)))),
        "told",
        "getitem of rows which are this context rank's, not all of a sequence, comes to the loss by sub",
        "`ContextRows.of_state(ps).of(targets, 1)` of whole sequences",
    ),
    Case(
        "a critic's targets by the last token's value, `v[:, -1:]`",
        by(valued(lambda v: 0.5 * v[:, -1:] + 0 * v)),
        "told",
        "getitem of rows which are this context rank's, not all of a sequence, comes to the loss by sub",
        "`ContextRows.of_state(ps).of(targets, 1)` of whole sequences",
    ),
    Case("a critic's targets by each token's own value", by(valued(lambda v: 0.5 * v + 1))),
    Case("distillation, a mean over tokens", by(distilled(lambda x, q: (q.exp() * (q - x)).sum(-1).mean() * 2.0))),
    Case("a teacher's hidden states, normed over time (data2vec)", by(taught_inside(normed)), "told", TOLD, SUMMED),
    Case(
        "a teacher's logits less their mean over rows (DINO)",
        by(taught(lambda p, y: y - y.mean((0, 1)))),
        "told",
        TOLD,
        SUMMED,
    ),
    Case(
        "a teacher's logits over their largest row", by(taught(lambda p, y: y / y.amax((0, 1)))), "told", TOLD, SUMMED
    ),
    Case("a teacher's logits as they are", by(taught(lambda p, y: y))),
    Case(
        "a teacher's hidden states, normed over their width",
        by(taught_inside(lambda p, h: F.layer_norm(h, h.shape[-1:]))),
    ),
    Case(
        "a teacher's logits less the mean of all rows", by(taught(lambda p, y: y - p.whole(y.mean((0, 1))) / p.ranks))
    ),
    Case(
        "weights scaled by what hooks saw of a rank's rows (Wanda, AWQ, SmoothQuant)",
        calibrated(energy),
        "told",
        r"ranks hold other values of decoder.*calibration, pruning",
        SUMMED,
    ),
    Case("the same by all rows", calibrated(lambda p, h: p.whole(energy(p, h)) / p.ranks)),
]

FAMILY = Family(
    "Rows without gradients over context ranks",
    "Sequences over two context ranks, three steps of SGD, compared with one process that does the same.",
    CASES,
    tuple(LAYOUTS),
)
