"""Parts of a program's own in every layer of a GPTModel whose sequences ranks share: `replace(spec, mlp=...)`."""

from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.nn.functional import all_gather

from core.context_parallel import gather_from_context_region
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ContextRows, ParallelState, context_batch
from core.tensor_parallel import gather_from_sequence_region
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.zoo.case import Case, Family, compared

LR, STEPS, S, H, FFN, VOCAB = 0.3, 3, 16, 32, 64, 40
CONTEXT, SEQUENCE = "2 context ranks", "2 tensor ranks, sequence parallelism"
LAYOUTS = {CONTEXT: {"cp": 2}, SEQUENCE: {"tp": 2, "sp": True}}
GATHER = "`gather_from_context_region(x, ps)` before it, or `gather_from_sequence_region(x, group)`"


class Part(nn.Module):
    """`between(part, y)`: what a program does with [s, b, f] between two linears that are whole on each rank."""

    between = staticmethod(lambda part, y: y)

    def __init__(self, build):
        super().__init__()
        self.ps, self.place = build.parallel, build.place
        self.up, self.down = nn.Linear(H, FFN).double(), nn.Linear(FFN, H).double()

    def forward(self, x):
        return self.down(type(self).between(self, self.up(x)))

    @property
    def ranks(self):
        return self.ps.size("cp") * self.ps.size("tp")

    @property
    def rank(self):
        return self.ps.index("cp") + self.place.rank

    @property
    def group(self):
        return self.ps.group("cp") or self.place.group

    def whole(self, y, f):
        """`f` of whole sequences; this rank's rows of what it returns."""
        if self.place.tp > 1:
            return f(gather_from_sequence_region(y, self.place.group)).chunk(self.place.tp, 0)[self.place.rank]
        return self.rows(f(gather_from_context_region(y, self.ps)))

    def rows(self, whole):
        """This rank's of a tensor of whole sequences."""
        if self.place.tp > 1:
            return whole.chunk(self.place.tp, 0)[self.place.rank]
        return ContextRows.of_state(self.ps).of(whole, 0)

    def sum(self, x, op=None):
        """Over all ranks that hold other rows."""
        if self.group is None:
            return x
        if op is not None:
            dist.all_reduce(x, op=op, group=self.group.process_group)
            return x
        return all_reduce(x, "sum", self.group.process_group)


def trained(ps, spec, steps=STEPS):
    config = llama_config(num_layers=2, hidden_size=H, num_attention_heads=4, params_dtype=torch.float64)
    model = GPTModel(config, spec, VOCAB, S, parallel=ps, seed=1)
    shard = DataParallel(model, ps, zero_stage=1)
    optimizer = ShardedSGD(shard, OptimizerConfig(lr=LR, clip_grad=0.0, weight_decay=0.0))
    for step in range(steps):
        tokens = torch.randint(VOCAB, (2, S + 1), generator=torch.Generator().manual_seed(step))
        given = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": torch.arange(S).expand(2, -1)}
        model(**context_batch(given, ps)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shard.remove()
    return whole_parameters(model, ps)


def parts(steps=STEPS, **made):
    """Weights after some steps: of ranks that share sequences, and of one process."""

    def run(variation):
        spec = replace(llama_spec(), **made)
        both = state(**LAYOUTS[variation]), ParallelState.single("cpu")
        return compared(*(trained(ps, spec, steps) for ps in both))

    return run


def between(function, **more):
    return parts(mlp=type("Mlp", (Part,), {"between": staticmethod(function), **more}))


def from_the_third(function):
    """It begins in a later forward."""

    def delayed(part, y):
        part.forwards = getattr(part, "forwards", 0) + 1
        return function(part, y) if part.forwards > 3 else y

    return parts(6, mlp=type("Mlp", (Part,), {"between": staticmethod(delayed)}))


def right(what, function, **more):
    return Case(what, between(function, **more))


def told(what, function, remedy=GATHER, says="looks along the sequence", **elsewhere):
    return Case(what, between(function), "told", says, remedy, **elsewhere)


class Norm(nn.Module):
    """By mean and deviation over the tokens, or over the width."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return (x - x.mean(self.dim, keepdim=True)) / (x.var(self.dim, keepdim=True) + 0.1).sqrt()


class Torch(nn.Sequential):
    """Torch's modules one after the other, on [b, h, s]."""

    def forward(self, x):
        return super().forward(x.permute(1, 2, 0)).permute(2, 0, 1)


def by_torch(make):
    return parts(mlp=lambda build: Torch(make().double()))


class Unseen(torch.autograd.Function):
    """Nobody follows what other people's kernels compute."""

    @staticmethod
    def forward(ctx, y):
        with torch._C.DisableTorchFunctionSubclass():
            return y + 0.5 * y.roll(1, 0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.5 * gradient.roll(-1, 0)


def gathered(part, y):
    """The token before, of whole sequences that torch.distributed gathered."""
    if part.group is None:
        return shifted(y)
    of_ranks = all_gather(y.contiguous(), group=part.group.process_group)
    s = y.shape[0] * len(of_ranks)
    rows = torch.arange(s).view(-1, y.shape[0])
    if part.place.tp == 1:
        rows = torch.stack([ContextRows(len(of_ranks), rank).rows(s) for rank in range(len(of_ranks))])
    return part.rows(shifted(torch.cat(of_ranks)[rows.flatten().argsort()]))


def shifted(y):
    return y + F.pad(y, (0, 0, 0, 0, 1, 0))[:-1]


def convolved(y):
    kernel = torch.ones(y.shape[-1], 1, 3).double() / 3
    return F.conv1d(F.pad(y.permute(1, 2, 0), (2, 0)), kernel, groups=y.shape[-1]).permute(2, 0, 1)


def in_slices(part, y):
    step = y.shape[0] // 4
    return torch.cat([F.gelu(y[i : i + step]) for i in range(0, y.shape[0], step)])


def routed(part, y):
    """Tokens whose first number is above 0 go one way, the others another."""
    flat = y.flatten(0, 1)
    mask = flat[:, 0] > 0
    out = torch.empty_like(flat)
    out[mask], out[~mask] = F.gelu(flat[mask]), F.silu(flat[~mask])
    return out.view_as(y)


def padded(part, y):
    chunks = F.pad(y, (0, 0, 0, 0, 0, -y.shape[0] % 3)).split(3)
    return torch.cat([F.gelu(c) for c in chunks])[: y.shape[0]]


def steps(y):
    return torch.stack([*accumulate(y, lambda h, v: (0.5 * h + v).tanh())])


def top(y):
    return y * (y[..., :1] >= y[..., :1].topk(y.shape[0] // 2, 0).values[-1:])


def quantized(y, largest):
    return y + ((y / largest * 8).round() / 8 * largest - y).detach()


def attended(y):
    q = y.transpose(0, 1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1)


def mask(y, seed=5):
    return torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) > 0.3


def dropped(p, y, seed):
    """DropPath: samples, for all of their tokens."""
    draws = torch.rand(1, y.shape[1], 1, generator=torch.Generator().manual_seed(seed))
    return y * (draws < 0.5).to(y)


def skipped(p, y, seed):
    """LayerDrop: by a coin of torch's own generator."""
    if not hasattr(p, "is_seeded"):
        p.is_seeded = True
        torch.manual_seed(seed)
    return y if torch.rand(()) < 0.5 else F.gelu(y)


CASES = [
    Case(
        "centred over the sequence from a later step on",
        from_the_third(lambda part, y: y - y.mean(0, keepdim=True)),
        "told",
        "looks along the sequence",
        GATHER,
    ),
    Case("another activation from a later step on", from_the_third(lambda part, y: F.silu(y))),
    right("by token: GELU", lambda p, y: F.gelu(y)),
    right("by token: a softmax and a norm over the width", lambda p, y: F.layer_norm(y.softmax(-1), y.shape[-1:])),
    right("by token: a norm's arithmetic by hand", lambda p, y: y / (y.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()),
    right("by token, all tokens in one dim", lambda p, y: F.silu(y.reshape(-1, FFN)).view(y.shape)),
    right("by token: heads of each", lambda p, y: y.unflatten(-1, (4, -1)).softmax(-2).flatten(2)),
    right("by token: a gate of halves", lambda p, y: torch.cat([(h := y.chunk(2, -1))[0] * h[1].sigmoid()] * 2, -1)),
    right("chunks of tokens, `y.chunk(4)`", lambda p, y: torch.cat([F.gelu(c) for c in y.chunk(4)])),
    right("chunks of tokens, slices in a loop", in_slices),
    right("chunks of tokens, padded", padded),
    right("tokens chosen by a mask of their own", routed),
    right("sequences of the batch in reverse", lambda p, y: F.gelu(y + 0.1 * y.flip(1))),
    right("a dropout of 0", lambda p, y: F.dropout(F.gelu(y), 0.0)),
    right(
        "squeeze-excite, its sum over all ranks",
        lambda p, y: y * (p.sum(y.sum(0, keepdim=True)) / S).sigmoid(),
    ),
    right("an RMS of everything, summed over all ranks", lambda p, y: y / (p.sum(y.pow(2).mean()) / p.ranks).sqrt()),
    right(
        "a quantiser by the largest of all ranks",
        lambda p, y: quantized(y, p.sum(y.detach().abs().max(), dist.ReduceOp.MAX)),
    ),
    right("a scale by the whole length", lambda p, y: y / (y.shape[0] * p.ranks) ** 0.5),
    right(
        "positions for whole sequences, cut",
        lambda p, y: y + p.rows(torch.linspace(-1, 1, S).double().view(-1, 1, 1)),
    ),
    right("the token before, of whole sequences", lambda p, y: p.whole(y, shifted)),
    right("a convolution over whole sequences", lambda p, y: p.whole(y, convolved)),
    right("the token before, gathered by torch.distributed", gathered),
    right("attention over whole sequences", lambda p, y: p.whole(y, attended)),
    right("what it says that it knows, `knows_context`", lambda p, y: p.whole(y, shifted), knows_context=True),
    Case("a norm of one's own, over the width", parts(norm=lambda build, size, over_heads=False: Norm(-1))),
    Case("torch's modules: `nn.Conv1d(h, h, 1)`", by_torch(lambda: nn.Conv1d(H, H, 1))),
    told("the token before, `y[:-1]` padded", lambda p, y: F.gelu(shifted(y))),
    told("a difference of neighbours", lambda p, y: y + F.pad(y[1:] - y[:-1], (0, 0, 0, 0, 1, 0))),
    told("a causal convolution", lambda p, y: F.gelu(convolved(y))),
    told("a sum so far, `cumsum`", lambda p, y: y.cumsum(0) / S),
    told("a recurrence", lambda p, y: steps(y)),
    told("a spectrum, `torch.fft.fft(y, dim=0)`", lambda p, y: torch.fft.fft(y, dim=0).real * 0.1),
    told("attention", lambda p, y: attended(y)),
    told("the largest tokens, `topk`", lambda p, y: top(y)),
    told("squeeze-excite", lambda p, y: y * y.mean(0, keepdim=True).sigmoid()),
    told("the largest of each sequence", lambda p, y: y - 0.1 * y.amax(0, keepdim=True)),
    told("`F.batch_norm`", lambda p, y: F.batch_norm(y.flatten(0, 1), None, None, training=True).view_as(y)),
    told("`F.instance_norm`", lambda p, y: F.instance_norm(y.permute(1, 2, 0)).permute(2, 0, 1)),
    told("an RMS of everything", lambda p, y: y / y.pow(2).mean().sqrt()),
    told("a number of it, `y / y.std().item()`", lambda p, y: y / y.detach().std().item()),
    told("a quantiser by its largest value", lambda p, y: quantized(y, y.detach().abs().max())),
    told(
        "a scale by the length at hand", lambda p, y: y / y.shape[0] ** 0.5, "the length of all", "the length of all"
    ),
    told(
        "positions by the length at hand",
        lambda p, y: y + torch.linspace(-1, 1, y.shape[0]).double().view(-1, 1, 1),
        "made for whole sequences and cut",
        "the same on all 2 ranks",
    ),
    told(
        "a mask drawn for the rows at hand, with one seed",
        lambda p, y: y * mask(y),
        "made for whole sequences and cut",
        "the same on all 2 ranks",
    ),
    told(
        "`F.dropout` on ranks that are seeded alike",
        lambda p, y: (torch.manual_seed(3), F.dropout(y, 0.3))[1],
        "a generator of its own per rank",
        "the same on all 2 ranks",
    ),
    right("samples dropped by one seed (DropPath)", lambda p, y: dropped(p, y, 1)),
    told(
        "samples dropped by a seed of each rank (DropPath)",
        lambda p, y: dropped(p, y, p.rank),
        "one seed on the ranks of a sequence",
        "takes numbers for whole samples that differ between 2 ranks",
    ),
    right("a part dropped by one seed (LayerDrop)", lambda p, y: skipped(p, y, 1)),
    told(
        "a part dropped by a seed of each rank (LayerDrop)",
        lambda p, y: skipped(p, y, p.rank),
        "one seed on the ranks of a sequence",
        "calls other functions on each rank: it is dropped on some",
    ),
    told("the first token otherwise", lambda p, y: torch.cat([y[:1] * 0, F.gelu(y[1:])])),
    told("what nobody follows: a function of autograd's", lambda p, y: Unseen.apply(y)),
    Case(
        "a norm of one's own, over the tokens",
        parts(norm=lambda build, size, over_heads=False: Norm(-1 if over_heads else 0)),
        "told",
        "looks along the sequence",
        GATHER,
    ),
    Case(
        "torch's modules: `nn.Conv1d(h, h, 3, padding=1)`",
        by_torch(lambda: nn.Conv1d(H, H, 3, padding=1)),
        "told",
        "looks along the sequence",
        GATHER,
    ),
    Case(
        "torch's modules: `nn.BatchNorm1d`",
        by_torch(lambda: nn.BatchNorm1d(H, track_running_stats=False)),
        "told",
        "looks along the sequence",
        GATHER,
    ),
]

FAMILY = Family(
    "Parts of one's own in layers",
    "`dataclasses.replace(llama_spec(), mlp=...)`, between two linears of its own, three steps; the ranks share each "
    "sequence. Compared with one process.",
    CASES,
    tuple(LAYOUTS),
)
