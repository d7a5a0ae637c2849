"""What a program sums over a context rank's rows: told where one process would go on otherwise, else not a word."""

import gc
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

from core.context_parallel.rows.sums import RowSums
from core.parallel_state import context_batch
from tests.states import state

S, V = 8, 5
CLASSES = torch.tensor([1, 2])
# rank 0 of 2 holds rows 0 1 6 7, rank 1 rows 2 3 4 5
UNEQUAL = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1]] * 2, dtype=torch.float64)
EQUAL = torch.tensor([[1, 1, 0, 1, 1, 0, 0, 0]] * 2, dtype=torch.float64)
LABELS = torch.arange(2 * S).view(2, S) % V


class Rows:
    """What a model gives: losses [b, s/cp], logits [b, s/cp, v], and the rows' numbers."""

    def __init__(self, mask):
        ps = state(cp=2)
        mine = context_batch({"tokens": LABELS, "labels": LABELS, "loss_mask": mask}, ps)
        draws = torch.Generator().manual_seed(ps.coordinate["cp"])
        shapes = ((2, S // 2), (2, S // 2, V), (S // 2, 2, V))
        self.leaves = [torch.rand(shape, generator=draws).requires_grad_() for shape in shapes]
        self.mask, self.position_ids = mine["loss_mask"], mine["position_ids"]
        self.labels = mine["labels"].masked_fill(self.mask == 0, -100)
        self.sums = RowSums(ps)
        self.group = ps.group("cp").process_group

    def outputs(self, *, followed):
        found = [leaf * 1.0 for leaf in self.leaves]
        for output in found if followed else ():
            self.sums._forwards = 0
            self.sums.follow(output, rows_dim=0 if output is found[2] else 1)
        # without its head a model gives hidden states [s/cp, b, h]
        self.losses, self.logits, self.hidden = found


def mean(r):
    return (r.losses * r.mask).sum() / r.mask.sum()


def total(r, value):
    n = value.clone()
    dist.all_reduce(n, group=r.group)
    return n


def largest(x, r):
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=r.group)
    return x


def by_ours(r, n):
    from core.parallel_state.collectives import all_reduce

    all_reduce(n, r.sums.group)
    return n


def normalised(x):
    return (x - x.mean()) / (x.std() + 1e-8)


def of_all(r):
    parts = [torch.empty_like(r.losses.detach()) for _ in range(2)]
    dist.all_gather(parts, r.losses.detach(), group=r.group)
    return torch.cat(parts).flatten()


def seeded_gru():
    torch.manual_seed(3)
    return torch.nn.GRU(V, 3, batch_first=True)


def logged(losses):
    assert f"{losses}" == f"{losses.clone().as_subclass(torch.Tensor)}" == repr(losses)
    return f"{losses.mean()} {losses.max():.1f} {losses.median().item()} {losses.sum() < 3}"


def selected(r, index):
    return r.losses.view(-1)[index].mean()


OWN = {
    "sum / sum": mean,
    "torch.sum": lambda r: torch.sum(r.losses.view(-1) * r.mask.view(-1)) / torch.sum(r.mask),
    "float, clamp": lambda r: (r.losses * r.mask).sum() / r.mask.sum().clamp(min=1),
    "eps": lambda r: (r.losses * r.mask).sum().div(r.mask.sum() + 1e-8),
    "in place": lambda r: (r.losses * r.mask).sum().div_(r.mask.sum()),
    "a number": lambda r: (r.losses * r.mask).sum() / r.mask.sum().item(),
    "selected": lambda r: r.losses[r.mask.bool()].mean(),
    "masked_select": lambda r: torch.masked_select(r.losses, r.mask > 0).mean(),
    "nonzero": lambda r: selected(r, r.mask.view(-1).nonzero().squeeze(1)),
    "index_select": lambda r: r.losses.view(-1).index_select(0, r.mask.view(-1).nonzero().squeeze(1)).mean(),
    "nonzero of both": lambda r: r.losses[r.mask.nonzero(as_tuple=True)].mean(),
    "of each sequence": lambda r: ((r.losses * r.mask).sum(1) / r.mask.sum(1)).mean(),
    "einsum": lambda r: torch.einsum("bs,bs->", r.losses, r.mask) / r.mask.sum(),
    "scaled": lambda r: mean(r) * 1024,
    "ignored labels": lambda r: F.cross_entropy(r.logits.view(-1, V), r.labels.view(-1)),
    "ignored labels, transposed": lambda r: F.cross_entropy(r.logits.transpose(1, 2), r.labels),
    "not reduced": lambda r: (
        F.cross_entropy(r.logits.flatten(0, 1), r.labels.flatten(), reduction="none").sum() / (r.labels != -100).sum()
    ),
    "nll": lambda r: F.nll_loss(r.logits.log_softmax(-1).flatten(0, 1), r.labels.flatten()),
    "nanmean": lambda r: r.losses.masked_fill(r.mask == 0, torch.nan).nanmean(),
    "selected logits": lambda r: F.cross_entropy(r.logits[r.mask.bool()], r.labels[r.mask.bool()]),
}
WEIGHTS = {
    "float weights": lambda r: (r.losses / (1 + r.position_ids)).sum() / (1 / (1 + r.position_ids)).sum(),
    "pooled": lambda r: F.cross_entropy(r.logits.mean(1), CLASSES),
    "pooled hidden states": lambda r: F.cross_entropy(r.hidden.mean(0), CLASSES),
    "the largest of hidden states": lambda r: F.cross_entropy(r.hidden.amax(0), CLASSES),
    "hidden states of the last row": lambda r: F.cross_entropy(r.hidden[-1], CLASSES),
    "smooth hidden states": lambda r: (r.hidden[1:] - r.hidden[:-1]).square().mean(),
    "variance of hidden states": lambda r: r.hidden.var(0).sum(),
    "pooled with a mask": lambda r: F.cross_entropy((r.logits * r.mask[..., None]).sum(1) / 8, CLASSES),
    "squared": lambda r: r.losses.mean() ** 2,
    "exp": lambda r: r.losses.mean().exp(),
    "norm": lambda r: r.losses.norm(),
    "largest": lambda r: r.losses.max(),
    "softmax over rows": lambda r: (r.losses.softmax(1) * r.losses).sum(),
    "shifted": lambda r: r.losses[:, 1:].sum(),
    "last": lambda r: F.cross_entropy(r.logits[:, -1], CLASSES),
    "last by number": lambda r: F.cross_entropy(r.logits[torch.arange(2), torch.tensor([3, 2])], CLASSES),
    "gathered": lambda r: r.losses.gather(1, torch.tensor([[1], [2]])).sum(),
    "smoothness": lambda r: (r.losses.diff(dim=1) ** 2).sum(),
    "a window of rows": lambda r: F.avg_pool1d(r.logits.transpose(1, 2), 3, 1).sum(),
    "pooled to one": lambda r: F.adaptive_avg_pool1d(r.logits.transpose(1, 2), 1).square().sum(),
    "convolution": lambda r: F.conv1d(r.logits.transpose(1, 2), torch.ones(2, V, 3)).sum(),
    "recurrent": lambda r: seeded_gru()(r.logits)[0].sum(),
    "unfolded": lambda r: r.losses.unfold(1, 2, 1).prod(-1).sum(),
    "summed by label": lambda r: (
        torch.zeros(V).index_add(0, r.labels.flatten().clamp(min=0), r.losses.flatten()).exp().sum()
    ),
    "at a tensor's rows": lambda r: r.logits[:, torch.tensor([3, 2])].sum(),
    "a baseline": lambda r: ((r.losses - r.losses.detach().mean()) ** 2).sum(),
    "a quantile": lambda r: (r.losses * (r.losses < r.losses.detach().quantile(0.5))).sum(),
    "a scaled baseline": lambda r: F.relu(r.losses - 0.9 * r.losses.data.view(-1).mean(0)).sum(),
    "above the mean": lambda r: (r.losses * (r.losses.detach() > r.losses.detach().mean(1, keepdim=True))).sum(),
    "normalised advantages": lambda r: (r.losses * normalised(r.losses.detach())).sum(),
    "detached softmax": lambda r: (r.losses * r.losses.detach().softmax(1)).sum(),
    "median": lambda r: (r.losses * (r.losses.detach() > r.losses.detach().median(1, keepdim=True).values)).sum(),
    "spans": lambda r: F.cross_entropy(r.losses, torch.tensor([1, 2])),
    "spans of logits": lambda r: F.cross_entropy(r.logits[..., 0], torch.tensor([1, 2])),
    "rows by rows": lambda r: (r.logits @ r.logits.mT).square().mean(),
    "rows by rows, bmm": lambda r: torch.bmm(r.logits, r.logits.transpose(1, 2)).tanh().mean(),
    "rows by rows, einsum": lambda r: torch.einsum("bsv,btv->bst", r.logits, r.logits).tanh().mean(),
    "attended": lambda r: F.scaled_dot_product_attention(r.logits, r.logits, r.logits).sum(),
}
RIGHT = {
    "mean": lambda r: r.losses.mean(),
    "sum / numel": lambda r: r.losses.sum() / r.losses.numel(),
    "accumulated": lambda r: r.losses.sum() / r.losses.numel() / 3,
    "sum, times the ranks": lambda r: r.losses.sum() * 2 / (2 * S),
    "sum of each sequence": lambda r: r.losses.sum(1).mean() / r.losses.shape[1],
    "scaled by a tensor": lambda r: torch.tensor(1024.0) * r.losses.sum() / (2 * S),
    "all_reduce": lambda r: (r.losses * r.mask).sum() * 2 / total(r, r.mask.sum()),
    "own mean, weighted": lambda r: mean(r) * r.mask.sum() / total(r, r.mask.sum()),
    "by the width": lambda r: (r.losses * r.mask).sum() * 2 / r.mask.shape[1],
    "sum of selected": lambda r: r.losses[r.mask.bool()].sum() * 2,
    "logged": lambda r: r.losses.mean() + 0 * mean(r).detach(),
    "looked at": lambda r: (
        r.losses.mean() if r.losses[0, -1] < 9 and r.losses.max() < 9 and len(r.losses.tolist()) else 0
    ),
    "all labels": lambda r: F.cross_entropy(r.logits.flatten(0, 1), r.labels.clamp(min=0).flatten()),
    "smoothed": lambda r: F.cross_entropy(r.logits.flatten(0, 1), r.labels.flatten(), reduction="sum") * 2 / 7,
    "z loss": lambda r: (r.logits.logsumexp(-1) ** 2).mean() + r.losses.mean(),
    "entropy": lambda r: (r.logits.softmax(-1) * r.logits.log_softmax(-1)).sum(-1).mean(),
    "a head over hidden states": lambda r: F.cross_entropy(
        (r.hidden @ torch.ones(V, V)).transpose(0, 1).flatten(0, 1), r.labels.clamp(min=0).flatten()
    ),
    "a penalty on hidden states": lambda r: r.hidden.square().mean() + r.hidden.transpose(0, 1).abs().mean(),
    "hidden states pooled over all ranks": lambda r: F.cross_entropy(
        all_reduce(r.hidden.sum(0), group=r.group) / S, CLASSES
    ),
    "a head": lambda r: (r.logits @ torch.ones(V, 2)).tanh().mean(),
    "own log-probabilities": lambda r: -r.logits.log_softmax(-1).gather(-1, r.labels.clamp(min=0)[..., None]).mean(),
    "pooled over all ranks": lambda r: F.cross_entropy(all_reduce(r.logits.sum(1), group=r.group) / S, CLASSES),
    "a baseline of all ranks": lambda r: ((r.losses - total(r, r.losses.detach().sum()) / (2 * S)) ** 2).mean(),
    "a baseline that is summed by ours": lambda r: ((r.losses - by_ours(r, r.losses.detach().sum()) / S) ** 2).mean(),
    "accuracy of all ranks": lambda r: r.losses.sum() * total(r, (r.logits.detach().argmax(-1) == r.labels).sum()),
    "above a mean of all ranks": lambda r: (
        r.losses * (r.losses.detach() > total(r, r.losses.detach().mean()) / 2)
    ).mean(),
    "the largest of all ranks": lambda r: (r.losses * (r.losses.detach() >= of_all(r).topk(5).values.min())).mean(),
    "stacked": lambda r: torch.stack([r.losses, 2 * r.losses]).mean(),
    "a detached weight for each": lambda r: ((1 - r.losses.detach().exp()) * r.losses).mean(),
    "by the rows' numbers": lambda r: (r.losses * r.position_ids / S).mean(),
    "after the first rows": lambda r: torch.where(r.position_ids > 2, r.losses, 0.0).mean(),
    "of each sequence by weight": lambda r: (r.losses * torch.tensor([[0.2], [0.8]])).mean(),
    "of each class": lambda r: (r.logits * torch.arange(V)).mean(),
    "all of them": lambda r: r.losses[torch.ones(2, S // 2, dtype=torch.bool)].mean(),
    "nothing on one rank": lambda r: r.losses.mean() * (r.position_ids[0, 0] == 0),
}
TOTALS = {  # divided by numbers that know nothing of the ranks
    "sum": lambda r: r.losses.sum(),
    "sum / batch": lambda r: r.losses.sum() / len(r.losses),
    "sum / all rows": lambda r: r.losses.sum() / (2 * S),
    "masked": lambda r: (r.losses * r.mask).sum() / 3,
    "of each sequence": lambda r: r.losses.sum(1).mean(),
    "scaled": lambda r: (r.losses.sum() * 1024).float() / 7,
    "selected": lambda r: r.losses[r.position_ids > 2].sum() / 3,
    "logits": lambda r: F.cross_entropy(r.logits.flatten(0, 1), r.labels.flatten(), reduction="sum") / 2,
    "batchmean": lambda r: F.kl_div(r.logits.log_softmax(-1), torch.ones(2, S // 2, V) / V, reduction="batchmean"),
    "mse": lambda r: F.mse_loss(r.logits, torch.zeros(2, S // 2, V), reduction="sum") / 2,
}
LOGS = {  # read as if they were of all rows
    "the largest": lambda r: r.losses.max().item(),
    "detached": lambda r: float(r.losses.detach().amin()),
    "where": lambda r: r.losses.argmax().item(),
    "in a text": lambda r: f"{r.losses.max(1).values:}",
    "printed": lambda r: print(r.losses.detach().quantile(0.9)),
    "scaled": lambda r: (r.losses.max() / 2).tolist(),
    "of logits": lambda r: r.logits.std().item(),
}
READ = {  # right, or of no consequence
    "the largest of all ranks": lambda r: largest(r.losses.detach().max(), r).item(),
    "the largest of all ranks, by ours": lambda r: float(by_ours(r, r.losses.detach().max())),
    "a mean": lambda r: r.losses.mean().item(),
    "a guard": lambda r: bool(r.losses.isnan().any()) or bool(r.losses.max() > 99),
    "the best class": lambda r: r.logits.argmax(-1).tolist(),
}
ARANGE = torch.arange(1, S // 2 + 1)
BY_POSITION = {  # made of each rank's rows alike
    "arange": lambda r: (r.losses * ARANGE).mean(),
    "linspace": lambda r: (torch.linspace(0, 1, S // 2) * r.losses).mean(),
    "decayed": lambda r: (r.losses.view(-1) / (1.0 + torch.arange(S) % 4)).mean(),
    "of logits": lambda r: (r.logits * ARANGE[:, None]).square().mean(),
    "the first are left out": lambda r: torch.where(ARANGE > 2, r.losses, 0.0).mean(),
    "masked_fill": lambda r: r.losses.masked_fill(ARANGE < 2, 0).mean(),
    "selected": lambda r: r.losses[(ARANGE > 2).expand(2, -1)].mean(),
    "matmul": lambda r: (r.losses @ ARANGE.to(r.losses)).mean() / S,
    "ones with zeros": lambda r: (r.losses * torch.ones(2, S // 2).index_fill(1, torch.tensor([0]), 0)).mean(),
}


def heard(loss_of, mask, repeats=1):
    """(messages, whether the gradients are those of outputs that nobody follows)"""
    rows, found = Rows(mask), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for followed in (False, *[True] * repeats):
            rows.outputs(followed=followed)
            gradients = torch.autograd.grad(loss_of(rows), rows.leaves, allow_unused=True)
            found.append([torch.zeros(()) if g is None else g for g in gradients])
    for gradients in found[1:]:
        assert all(
            type(g) is torch.Tensor and torch.equal(g, same) for g, same in zip(gradients, found[0], strict=True)
        )
    return [str(w.message) for w in caught if w.category is not FutureWarning]


def all_heard(table, mask):
    return {name: heard(loss_of, mask) for name, loss_of in table.items()}


def own(mask):
    return all_heard(OWN, mask)


def weights(mask):
    return all_heard(WEIGHTS, mask)


def right(mask):
    return all_heard(RIGHT, mask)


def totals(mask):
    return all_heard(TOTALS, mask)


def read(table):
    def loss_of(r, look):
        look(r)
        return r.losses.mean()

    return {name: heard(partial(loss_of, look=look), UNEQUAL) for name, look in table.items()}


def logs():
    return read(LOGS)


def reads():
    return read(READ)


def by_position(mask):
    return all_heard(BY_POSITION, mask)


@pytest.mark.parametrize("job", [own, weights])
def test_what_counts_otherwise_than_on_one_process_is_told(ranks, job):
    for found in ranks(job, UNEQUAL, world=2):
        for name, messages in found.items():
            assert len(messages) == 1, (name, messages)
            assert "which are this context rank's" in messages[0] or "counts otherwise" in messages[0], name
            assert "all_reduce(n, group=" in messages[0] and "_functional_collectives.all_reduce(x" in messages[0]


@pytest.mark.parametrize("mask", [UNEQUAL, EQUAL])
def test_a_sum_that_knows_nothing_of_the_ranks_is_told(ranks, mask):
    for found in ranks(totals, mask, world=2):
        for name, messages in found.items():
            assert len(messages) == 1, (name, messages)
            assert "divided by numbers only" in messages[0] and "multiply it by 2" in messages[0], name


def test_weights_that_count_from_each_ranks_first_row_are_told(ranks):
    for found in ranks(by_position, UNEQUAL, world=2):
        for name, messages in found.items():
            assert len(messages) == 1, (name, messages)
            assert "the same on all 2 context ranks" in messages[0] and "position_ids" in messages[0], name


def test_a_statistic_of_own_rows_is_told_where_it_is_read(ranks):
    for found in ranks(logs, world=2):
        for name, messages in found.items():
            assert len(messages) == 1 and "is read" in messages[0] and "ReduceOp.MAX" in messages[0], (name, messages)
    for found in ranks(reads, world=2):
        assert not {name: messages for name, messages in found.items() if messages}


@pytest.mark.parametrize("job, mask", [(right, UNEQUAL), (own, EQUAL), (right, EQUAL)])
def test_right_programs_hear_nothing(ranks, job, mask):
    for found in ranks(job, mask, world=2):
        assert not {name: messages for name, messages in found.items() if messages}


def told_once():
    return heard(OWN["sum / sum"], UNEQUAL, repeats=3)


def test_it_is_told_once(ranks):
    assert all(len(messages) == 1 for messages in ranks(told_once, world=2))


def compiled():
    return heard(
        torch.compile(lambda r: F.cross_entropy(r.logits.flatten(0, 1), r.labels.flatten()), backend="eager"), EQUAL
    )


def test_compiled_losses_are_left_alone(ranks):
    assert ranks(compiled, world=2) == [[], []]


def stances():
    """Of compiled code: while an evaluation's logits live, and after."""
    from torch._dynamo import eval_frame

    # models of earlier tests, whose losses had no backward, may hold code as it was written
    gc.collect()
    double = torch.compile(lambda x: 2 * x, backend="eager")
    double(torch.ones(2))
    logits = torch.rand(2, S // 2, V)
    Rows(EQUAL).sums.follow(logits)
    found = [eval_frame._stance.stance]
    del logits
    found.append(eval_frame._stance.stance)
    torch._dynamo.reset()
    return found


def test_code_is_compiled_again_after_an_evaluation(ranks):
    assert ranks(stances, world=2) == [["force_eager", "default"]] * 2
