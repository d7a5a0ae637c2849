"""What loops do by hand with whole weights, on a model that ranks share."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from core.data_parallel import DataParallel
from core.optimizer import OptimizerConfig, ShardedSGD
from core.tensor_parallel import full_tensor, gather_from_sequence_region
from tests.models.gpt import batch
from tests.zoo.case import Case, compared
from tests.zoo.split_model import (
    CLIP,
    LR,
    ONE,
    SEQUENCE,
    STEPS,
    gradients,
    loss_of,
    models,
    only_split,
    sgd,
    train,
    weights,
)

NORM, FC1 = "`core.optimizer.get_grad_norm`", "decoder.layers.0.mlp.linear_fc1"
FC2, TABLE = "decoder.layers.0.mlp.linear_fc2", "embedding.word_embeddings"
ROWS = {SEQUENCE: ("told", "a forward hook on .* sees this")}


def matrices(model):
    return [p for p in model.parameters() if p.dim() > 1]


def stepping(update):
    """A loop that has no optimizer."""

    def program(model):
        for step in range(STEPS):
            loss_of(model, step).backward()
            with torch.no_grad():
                update(model)
            model.zero_grad()

    return weights(program)


def elementwise(model):
    for p in model.parameters():
        p -= LR * p.grad.clamp(-1, 1)


def through_data(model):
    for p in model.parameters():
        p.data.mul_(0.999).add_(p.grad.data, alpha=-LR)


def lars(model):
    for p in model.parameters():
        p -= LR * p.grad * p.norm() / p.grad.norm()


def lars_of_data(model):
    for p in model.parameters():
        p.data.sub_(LR * p.grad.data * p.detach().float().pow(2).sum().sqrt().item())


def noisy(model):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for p in model.parameters():
            p.sub_(LR * p.grad + 1e-3 * torch.randn_like(p))


def clipped(model):
    norm = torch.stack([p.grad.detach().data.norm(2) for p in model.parameters()]).norm(2)
    for p in model.parameters():
        p.data.add_(p.grad.data, alpha=-LR * min(1.0, 0.1 / norm.item()))


def max_norm(model):
    def bound():
        with torch.no_grad():
            for p in matrices(model):
                p.mul_((1.0 / p.norm()).clamp(max=1.0))

    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        bound()


def logged(model):
    log = []
    train(model, between=lambda: log.append(sum(p.grad.detach().data.norm(2) ** 2 for p in model.parameters())))


def late(model):
    """Max-norm from the fourth step on."""
    optimizer = sgd(model)
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3:
            with torch.no_grad():
                for p in matrices(model):
                    p.mul_((1.0 / p.norm()).clamp(max=1.0))


def sanity_checked(model):
    """A validation before the training, as Lightning makes one, then a penalty."""
    with torch.no_grad():
        loss_of(model)
        loss_of(model, 1)
    (loss_of(model) + 0.1 * group_lasso(model)).backward()


def pad_row(model):
    """The first rows of the vocabulary keep their values."""

    def forget():
        model.embedding.word_embeddings.weight.grad[:50] = 0

    train(model, between=forget)


def averaged(over_data_ranks):
    """`average_gradients` of torch's tutorial."""

    def program(model):
        group = model.parallel.group("dp")
        parameters = [p for p in model.parameters() if dist.is_initialized()]

        def average():
            if over_data_ranks and group is None:
                return  # one replica
            for p in parameters:
                dist.all_reduce(p.grad, group=group.process_group if over_data_ranks else None)

        train(model, between=average)

    return weights(program)


def penalized(penalty):
    """The gradients of a loss with a penalty on weights."""

    def program(model):
        (loss_of(model) + 0.1 * penalty(model)).backward()

    return gradients(program, style="llama")


def ema(model):
    """A moving average of the weights, put in at the end."""
    kept = {}

    def average():
        for name, p in model.named_parameters():
            kept[name] = p.detach().clone() if name not in kept else kept[name].lerp(p.detach(), 0.1)

    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average()
    model.load_state_dict(kept)


def group_lasso(model):
    return sum(p.norm() for p in matrices(model))


def whole_group_lasso(model):
    return sum(full_tensor(p, parallel=model.parallel).norm() for p in matrices(model))


def whole_orthogonality(model):
    found = [full_tensor(p, parallel=model.parallel).flatten(0, -2) for p in matrices(model)]
    return sum((w.T @ w).square().sum() for w in found)


def looked_at(variation):
    """Whole gradients and values, on every layout."""
    found = []
    for model in models(variation, "llama"):
        loss_of(model).backward()
        named = dict(model.named_parameters())
        found.append({f"grad {n}": full_tensor(p.grad, like=p, parallel=model.parallel) for n, p in named.items()})
        found[-1] |= {n: full_tensor(p.detach(), like=p, parallel=model.parallel) for n, p in named.items()}
    return compared(*found)


def in_hooks(hook):
    """`hook` on every matrix's gradient, before it is there."""

    def program(model):
        for p in matrices(model):
            p.register_hook(hook)
        train(model)

    return weights(program)


def in_forward(module, look):
    """`look(module, output)` of a forward hook, which may return another output."""

    def program(model):
        model.get_submodule(module).register_forward_hook(lambda part, given, output: look(part, output))
        train(model)

    return weights(program)


def noisy_output(part, output):
    torch.manual_seed(0)
    return output + 0.01 * torch.randn_like(output)


def guarded(part, output):
    assert not output.isnan().any() and output.isfinite().all()


def added_to_the_loss(whole):
    """The mean of a layer's squares, heard in a forward hook, as a term of the loss."""

    def program(model):
        heard, optimizer = [], sgd(model)
        rows = partial(gather_from_sequence_region, group=model.place.group, to_tensor_region=False)
        of = rows if whole and model.place.splits_sequence else lambda x: x
        hook = model.decoder.layers[0].register_forward_hook(
            lambda part, given, x: heard.append(of(x).square().mean())
        )
        for step in range(STEPS):
            (loss_of(model, step) + heard.pop()).backward()
            optimizer.step()
            optimizer.zero_grad()
        hook.remove()

    return weights(program)


def per_rank(part):
    """The loss of each token, multiplied by `part(its rank, its shape)`, the mean by it."""

    def program(model):
        optimizer = sgd(model)
        for step in range(STEPS):
            tokens, labels = batch(step)
            losses = model(tokens, labels=labels)
            (losses * part(model.parallel.coordinate["tp"], losses.shape)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return weights(program)


def dropped(seed):
    return lambda rank, shape: (torch.rand(shape, generator=torch.Generator().manual_seed(seed(rank))) > 0.3).double()


def in_buckets(look):
    """`look(model)` before each update of a sharded optimizer."""

    def program(model):
        shard = DataParallel(model, model.parallel, zero_stage=1)
        optimizer = ShardedSGD(shard, OptimizerConfig(lr=LR, clip_grad=0.0, weight_decay=0.0))
        train(model, optimizer, between=lambda: look(model))
        shard.remove()

    return weights(program)


def told(what, run, remedy="`core.tensor_parallel.full_tensor(p)`", says="full_tensor"):
    return Case(what, run, "told", says, remedy, elsewhere={ONE: ("right", "")})


CASES = [
    Case("SGD by hand, `p -= lr * p.grad`", stepping(elementwise)),
    Case("SGD and decay by hand through `.data`", stepping(through_data)),
    Case("an average of the weights (EMA), put in at the end", weights(ema)),
    told("LARS by hand, `p.norm() / p.grad.norm()`", stepping(lars)),
    told("a trust ratio by hand through `.data` and `.float()`", stepping(lars_of_data)),
    told("noise on the weights, `randn_like(p)`", stepping(noisy), "a generator of its own per rank", "generator"),
    told("a log of `p.grad.norm()`", weights(logged), "`core.optimizer.get_grad_norm`", "get_grad_norm"),
    told("max-norm after the step", weights(max_norm)),
    told("max-norm from the fourth step on", weights(late)),
    told("a penalty after a validation without gradients", gradients(sanity_checked, style="llama")),
    told(
        "`dist.all_reduce(p.grad)` over all ranks",
        averaged(False),
        "`group=get_data_parallel_group()`",
        "get_data_par",
    ),
    Case("`dist.all_reduce(p.grad)` over the data ranks", averaged(True)),
    told("rows of the vocabulary by number, `w.grad[:50] = 0`", weights(pad_row), says="rows and columns by number"),
    told("a group lasso, `p.norm()` in the loss", penalized(group_lasso)),
    told("weight decay in the loss, `p.pow(2).sum()`", penalized(lambda m: sum(p.pow(2).sum() for p in matrices(m)))),
    told(
        "orthogonality in the loss, `p.flatten(1) @ p.flatten(1).T`",
        penalized(lambda m: sum((p.flatten(1) @ p.flatten(1).T).square().sum() for p in matrices(m))),
    ),
    told(
        "`parameters_to_vector(...).norm()` in the loss",
        penalized(lambda m: parameters_to_vector(matrices(m)).norm()),
    ),
    Case("a group lasso over `full_tensor(p)`", penalized(whole_group_lasso)),
    Case("`full_tensor(p.grad, like=p)`, `full_tensor(p.detach(), like=p)`", looked_at),
    Case(
        "`full_tensor(p.detach())`",
        weights(lambda model: full_tensor(matrices(model)[0].detach(), parallel=model.parallel)),
        "refused",
        "like=parameter",
        "`like=p`",
    ),
    Case("orthogonality of `full_tensor(p)`", penalized(whole_orthogonality)),
    told("`p.register_hook(lambda g: g / g.norm())`", in_hooks(lambda g: g / g.norm()), NORM, "get_grad_norm"),
    Case("`p.register_hook(lambda g: g.clamp(-1, 1))`", in_hooks(lambda g: g.clamp(-0.01, 0.01))),
    told("a norm of a weight in a forward hook", in_forward(FC1, lambda part, output: part.weight.norm() and None)),
    told(
        "noise on an activation between split linears, in a forward hook",
        in_forward(FC1, noisy_output),
        "`gather_from_tensor_region`",
        "draw the same mask|forward hook",
    ),
    told(
        "heads over the deviation of all, in a forward hook on the attention",
        in_forward(
            "decoder.layers.0.self_attention.core_attention",
            lambda part, y: y / y.transpose(1, 2).flatten(2).std(-1)[:, None, :, None],
        ),
        "`gather_from_tensor_region`",
        "gather_from_tensor_region|forward hook",
    ),
    *[
        Case(f"a forward hook, {what}", in_forward(module, look), elsewhere=ROWS)
        for what, module, look in (
            ("elementwise: `torch.nan_to_num(y) * 0.9`", FC1, lambda part, y: torch.nan_to_num(y) * 0.9),
            ("a guard: `assert not y.isnan().any()`", FC1, guarded),
            (
                "on the table, `y / y.norm(dim=-1, keepdim=True)`",
                TABLE,
                lambda part, y: y / y.norm(dim=-1, keepdim=True),
            ),
            ("on a row linear, `y / y.std(-1, keepdim=True)`", FC2, lambda part, y: y / y.std(-1, keepdim=True)),
        )
    ],
    Case(
        "the mean square of a layer's output in a forward hook, added to the loss",
        added_to_the_loss(whole=False),
        elsewhere={SEQUENCE: ("told", "counts once on each tensor rank.*gather_from_sequence_region")},
        remedy="`gather_from_sequence_region(x, group, to_tensor_region=False)`",
    ),
    Case("losses of the tokens that a mask leaves, one on all tensor ranks", per_rank(dropped(lambda rank: 3))),
    Case(
        "losses of the tokens that a mask leaves, another on each tensor rank",
        per_rank(dropped(lambda rank: rank)),
        "refused",
        "different losses",
        "one seed on all tensor ranks",
        elsewhere={ONE: ("right", "")},
    ),
    Case(
        "a loss weighted by the tensor rank",
        per_rank(lambda rank, shape: 1.0 + rank),
        "refused",
        "different losses",
        "one weight on all tensor ranks",
        elsewhere={ONE: ("right", "")},
    ),
    Case(
        "clip_grad_norm_ of torch's under DataParallel",
        in_buckets(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
    ),
    told(
        "a log of `(p.grad**2).sum()` under DataParallel",
        in_buckets(lambda model: sum((p.grad**2).sum() for p in model.parameters())),
        NORM,
        "get_grad_norm",
    ),
    told(
        "a log of `torch.cat([p.grad.flatten() ...]).norm()` under DataParallel",
        in_buckets(lambda model: torch.cat([p.grad.flatten() for p in model.parameters()]).norm()),
        NORM,
        "get_grad_norm",
    ),
    told(
        "rows of a gradient by number under DataParallel, `p.grad[:3] = 0`",
        in_buckets(lambda model: matrices(model)[0].grad[:3].zero_()),
        says="rows and columns by number",
    ),
    Case("clipped and updated by hand", stepping(clipped), elsewhere=only_split("refused", CLIP), remedy=f"`{CLIP}`"),
]
