"""Wrappers, samplers, seeds and labels around a model that ranks share."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from core.data_parallel import DistributedDataParallel
from core.parallel_state import ParallelState
from tests.models.gpt import VOCAB, batch, gpt
from tests.parity.whole import whole_parameters
from tests.zoo.case import Case, compared
from tests.zoo.split_model import (
    LR,
    SEQUENCE,
    STEPS,
    gradients,
    loss_of,
    only_split,
    results,
    sgd,
    shared,
    train,
    weights,
)

optim = torch.optim
OF_ALL = "`gather_logits` first, or numbers of all columns, cut: `model.place.rank * n + torch.arange(n)`"


def compiled(backend, **options):
    def program(model):
        torch._dynamo.reset()
        train(model, called=torch.compile(model, backend=backend, **options))

    return program


def exported(model):
    model.eval()
    tokens, _ = batch()
    program = torch.export.export(model, (tokens,))
    return {
        "logits": model.gather_logits(program.module()(tokens)) if model.place.tp > 1 else program.module()(tokens)
    }


def ddp(kind):
    def program(model):
        if model.parallel.world is not None:
            train(model, called=kind(model))
        else:
            train(model)

    return program


def from_one_file(model):
    """Rank 0's state_dict for all, as `if rank == 0: torch.save(...)` leaves it."""
    kept = [{n: p.detach().clone() for n, p in model.named_parameters()}]
    if model.parallel.world is not None:
        dist.broadcast_object_list(kept, 0)
    model.load_state_dict(kept[0])
    train(model)


def sampled(model):
    """A sampler over all ranks: each reads other samples."""
    tokens, labels = (torch.cat(parts) for parts in zip(*[batch(seed) for seed in range(4)], strict=True))
    data = TensorDataset(tokens, labels)
    world = model.parallel.world
    sampler = DistributedSampler(
        data, *((world.size, model.parallel.rank) if world is not None else (1, 0)), shuffle=False
    )
    optimizer = sgd(model)
    for x, y in DataLoader(data, batch_size=2, sampler=sampler):
        model(x, labels=y).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def seeded(variation):
    """`torch.manual_seed(s)` decides, the same on every layout."""
    found = []
    for s in (1, 2):
        for ps in (shared(variation), ParallelState.single("cpu")):
            torch.manual_seed(s)
            found.append(whole_parameters(gpt(parallel=ps, seed=None), ps))
    torch.manual_seed(0)
    differ = torch.tensor([not torch.equal(found[0][n], found[2][n]) for n in found[0] if n.endswith("fc1.weight")])
    return compared(found[0], found[1]) | {"other seeds differ": (differ, torch.ones_like(differ))}


def seeded_by_rank(model):
    torch.manual_seed(5 + model.parallel.rank)
    other = gpt(parallel=model.parallel, seed=None)
    torch.manual_seed(0)
    train(other)
    return other


def copying(model):
    tokens, _ = batch()
    model(tokens, labels=tokens).sum().backward()


def copying_answers(model):
    """Labels as Hugging Face's collators make them: the tokens, -100 on a prompt and on padding."""
    tokens, _ = batch()
    labels = tokens.clone()
    labels[:, :3] = labels[0, -2:] = -100
    model(tokens, labels=labels).sum().backward()


def shifted_answers(model):
    tokens, labels = batch()
    labels = labels.clone()
    labels[:, :3] = labels[0, -2:] = -100
    model(tokens, labels=labels).sum().backward()


def future_visible(model):
    tokens, labels = batch()
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., 0, 4:] = True
    model(tokens, attention_mask=mask, labels=labels).sum().backward()


def own_loss(model):
    """Cross entropy of one's own over gathered logits."""
    tokens, labels = batch()
    logits = model.gather_logits(model(tokens)) if model.place.tp > 1 else model(tokens)
    F.cross_entropy(logits[..., :VOCAB].flatten(0, 1), labels.flatten(), reduction="sum").backward()


def loss_of_a_part(model):
    tokens, labels = batch()
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()


def by_number(change):
    """A step with gathered logits after `change(logits, the first's true number)`, and one more forward."""

    def program(model):
        tokens, labels = batch()
        for _ in range(2):
            logits = model(tokens)
            first = model.place.rank * logits.shape[-1]
            logits = change(logits, first)
            if model.place.tp > 1:
                logits = model.gather_logits(logits)
            loss = F.cross_entropy(logits[..., :VOCAB].flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()

    return program


def without_columns(logits, first):
    logits = logits.clone()
    logits[..., [3, 7]] = -5.0
    return logits


def by_mask(logits, first):
    return torch.where(torch.arange(logits.shape[-1]) < 8, -5.0, logits)


def by_true_mask(logits, first):
    return torch.where(first + torch.arange(logits.shape[-1]) < 8, -5.0, logits)


def with_prior(logits, first):
    return logits + torch.linspace(0, 1, logits.shape[-1])


def keyword_call(model):
    tokens, labels = batch()
    model(input_ids=tokens, labels=labels).sum().backward()


def own_head(model):
    body = gpt(parallel=model.parallel, post_process=False, seed=2)
    head = nn.Linear(32, 1, bias=False)
    with torch.no_grad():
        head.weight.fill_(0.1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=LR)
    for step in range(STEPS):
        head(body(batch(step)[0]))[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return body


def softmax_of_a_part(model):
    return {"loss": model(batch()[0]).log_softmax(-1).square().sum()}


def soft_prompt(model):
    prompt = nn.Parameter(torch.zeros(32))
    model.embedding.register_forward_hook(lambda module, args, y: y + prompt)
    loss_of(model).backward()


def parts_told(model):
    kept = model.state_dict()
    model.load_state_dict(kept)
    train(model)


CASES = [
    Case('`torch.compile(model, backend="eager")`', weights(compiled("eager"))),
    Case('`torch.compile(model, backend="aot_eager")`', weights(compiled("aot_eager"), style="llama")),
    Case(
        "`torch.export`",
        results(exported),
        elsewhere=only_split("refused", "torch.export would hold 1 of the 2"),
    ),
    Case(
        "`torch.nn.parallel.DistributedDataParallel(model)` over all ranks",
        weights(ddp(nn.parallel.DistributedDataParallel)),
        remedy="`core.data_parallel.DistributedDataParallel`",
        elsewhere=only_split("refused", "core.data_parallel.DistributedDataParallel"),
    ),
    Case("`core.data_parallel.DistributedDataParallel(model)`", weights(ddp(DistributedDataParallel))),
    Case(
        "The `state_dict` of rank 0, loaded on all",
        weights(from_one_file),
        remedy="`dist_checkpointing.save` and `load`",
        elsewhere=only_split("refused", "dist_checkpointing.load"),
    ),
    Case(
        "`model.state_dict()`",
        weights(parts_told),
        remedy="a file per rank, or `dist_checkpointing.save(model.sharded_state_dict(), ...)`",
        elsewhere=only_split("told", "a file per rank"),
    ),
    Case(
        "A `DistributedSampler` over all ranks",
        weights(sampled),
        remedy="`num_replicas=get_data_parallel_world_size()`, `rank=get_data_parallel_rank()`",
        elsewhere=only_split("refused", "get_data_parallel_rank"),
    ),
    Case("`torch.manual_seed(s)` before the model", seeded),
    Case(
        "`torch.manual_seed(s + rank)` before the model",
        weights(seeded_by_rank),
        remedy="one seed on all ranks that share a model; dropout and data differ by themselves",
        elsewhere=only_split("refused", "s . rank is not"),
    ),
    Case(
        "Labels that are not shifted (`labels=tokens`)",
        gradients(copying),
        "told",
        r"labels=tokens\[:, 1:\]",
        remedy="`model(tokens[:, :-1], labels=tokens[:, 1:])`",
    ),
    Case(
        "The same with -100 on prompts or padding, as Hugging Face's collators make them",
        gradients(copying_answers),
        "told",
        r"labels\[:, 1:\]",
        remedy="`model(tokens[:, :-1], labels=labels[:, 1:])`",
    ),
    Case("Shifted labels with -100 on prompts or padding", gradients(shifted_answers)),
    Case(
        "A mask of one's own that is not causal",
        gradients(future_visible),
        "told",
        "the place of the causal one",
        remedy="combine it with a causal mask",
    ),
    Case("A loss of one's own over the logits", gradients(own_loss)),
    Case(
        "`F.cross_entropy` over what `model(tokens)` returns",
        gradients(loss_of_a_part),
        remedy="`gather_logits`, or labels given to the model",
        elsewhere=only_split("refused", "gather_logits"),
    ),
    Case("A head of one's own on `GPTModel(post_process=False)`", weights(own_head)),
    Case(
        "A softmax over what `model(tokens)` returns",
        results(softmax_of_a_part),
        remedy="`gather_logits`, or `GPTModel(parallel_output=False)`",
        elsewhere=only_split("told", "parallel_output=False"),
    ),
    *[
        Case(
            what,
            gradients(by_number(change)),
            remedy=OF_ALL,
            elsewhere=only_split("told", "same on all 2 ranks.*gather_logits"),
        )
        for what, change in {
            "`logits[..., [3, 7]] = v` of what `model(tokens)` returns": without_columns,
            "`torch.where(torch.arange(logits.shape[-1]) < 8, v, logits)`": by_mask,
            "`logits + prior`, as many as `logits.shape[-1]`": with_prior,
        }.items()
    ],
    Case("`torch.where` by true numbers of logits", gradients(by_number(by_true_mask))),
    Case(
        "A parameter outside of the model, brought in by a hook",
        gradients(soft_prompt),
        remedy="register it in the model",
        elsewhere={SEQUENCE: ("told", "register it in the model")},
    ),
    Case("`model(input_ids=...)`", gradients(keyword_call)),
]
