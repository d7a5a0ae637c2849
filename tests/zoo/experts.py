"""What loops do with experts of which every data rank holds others."""

import io

import torch
import torch.distributed as dist
from torch import nn

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.tensor_parallel import full_tensor
from tests.models.gpt import VOCAB, gpt
from tests.parity.whole import whole_parameters
from tests.states import state
from tests.zoo.case import Case, Family, compared

LR, STEPS = 0.05, 3
FACTS = {"num_moe_experts": 4, "moe_router_topk": 2}
DATA, TENSOR = "2 data ranks", "2 tensor ranks"
LAYOUTS = {DATA: {"expert": 2}, TENSOR: {"expert": 2, "tp": 2}}


def states(variation):
    return state(**LAYOUTS[variation]), ParallelState.single("cpu")


def loss_of(model, step):
    """The mean over this rank's half of four sequences."""
    ps = model.parallel
    tokens, labels = torch.randint(VOCAB, (2, 4, 8), generator=torch.Generator().manual_seed(step))
    rows = slice(ps.index("dp") * 4 // ps.size("dp"), (ps.index("dp") + 1) * 4 // ps.size("dp"))
    return model(tokens[rows], labels=labels[rows]).mean()


def train(model, loss=loss_of, between=lambda model: None, after=lambda model: None, start=lambda model: None):
    start(model)
    shard = DataParallel(model, model.parallel, zero_stage=1)
    optimizer = ShardedSGD(shard, OptimizerConfig(lr=LR, clip_grad=0.0, weight_decay=0.0))
    for step in range(STEPS):
        loss(model, step).backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            after(model)
    shard.remove()


def weights(**program):
    def run(variation):
        found = []
        for ps in states(variation):
            model = gpt("llama", parallel=ps, facts=FACTS)
            train(model, **program)
            found.append(whole_parameters(model, ps))
        return compared(*found)

    return run


def experts(model):
    return [p for name, p in model.named_parameters() if ".experts." in name]


def penalized(penalty):
    return weights(loss=lambda model, step: loss_of(model, step) + 0.1 * penalty(model))


def bounded(model):
    for p in experts(model):
        p.mul_((1.0 / p.norm()).clamp(max=1.0))


def noisy(model):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for p in experts(model):
            p.add_(1e-3 * torch.randn_like(p))


def drawn(model):
    torch.manual_seed(5)
    for p in experts(model)[:1]:
        nn.init.normal_(p, 0, 0.1)


def one_file(model):
    """Rank 0's `state_dict()`, loaded on all ranks."""
    file = io.BytesIO()
    torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, file)
    files = [file.getvalue()]
    if model.parallel.size("ep") > 1:
        dist.broadcast_object_list(files, src=0)
    model.load_state_dict(torch.load(io.BytesIO(files[0])), strict=False)


def clipped(model):
    """A bucket knows the norm of all experts."""
    for p in experts(model):
        p.grad.mul_(min(1.0, 0.01 / p.grad.norm().item()))


def count(model):
    return sum(p.numel() for p in experts(model)) * loss_scale(model)


def loss_scale(model):
    return 1e-6 * experts(model)[0].square().mean()


def read_state_dict(model):
    model.state_dict()


FULL = "`core.tensor_parallel.full_tensor(p)`"


def told(what, run, remedy=FULL, says="full_tensor"):
    return Case(what, run, "told", says, remedy)


CASES = [
    Case("the loop of everybody", weights()),
    told("weight decay in the loss, `p.pow(2).sum()`", penalized(lambda m: sum(p.pow(2).sum() for p in experts(m)))),
    Case(
        "weight decay of `full_tensor(p)` in the loss",
        penalized(lambda m: sum(full_tensor(p, parallel=m.parallel).pow(2).sum() for p in experts(m))),
    ),
    Case(
        "a group lasso of `full_tensor(p)` in the loss",
        penalized(lambda m: sum(full_tensor(p, parallel=m.parallel).norm() for p in experts(m))),
    ),
    told("max-norm after the step", weights(after=bounded)),
    told(
        "noise on the experts, `randn_like(p)`", weights(after=noisy), "a generator of its own per rank", "generator"
    ),
    told("`nn.init` on an expert's weights", weights(start=drawn), "a generator of its own per rank", "generator"),
    told(
        "a count of the experts' weights", penalized(count), "`core.parallel_state.layout_of(p).shape`", "layout_of"
    ),
    Case("clipping by `p.grad.norm()`", weights(between=clipped)),
    told(
        "a log of `(p.grad**2).sum()`",
        weights(between=lambda model: [(p.grad**2).sum() for p in experts(model)]),
        "`core.optimizer.get_grad_norm`",
        "get_grad_norm",
    ),
    told("`model.state_dict()`", weights(start=read_state_dict), "`dist_checkpointing.save`", "dist_checkpointing"),
    Case(
        "rank 0's `state_dict()` loaded on all ranks",
        weights(start=one_file),
        "refused",
        "dist_checkpointing.load",
        "`dist_checkpointing.save` and `load`",
    ),
]
FAMILY = Family(
    "Experts that ranks share",
    "Of a GPTModel under DataParallel, on two data ranks and on two tensor ranks; compared with one process.",
    CASES,
    tuple(LAYOUTS),
)
