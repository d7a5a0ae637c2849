"""A step in Megatron's words gives what one process gives with the mean over microbatches."""

import copy
import warnings
from functools import cache

import pytest
import torch
from torch.utils.data import DataLoader

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt_stages, llama_spec
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import get_forward_backward_func, looped
from tests.models.gpt import POSITIONS, VOCAB, batch, config, gpt
from tests.parity.whole import assert_same
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync

MICROBATCHES, B = 4, 2


def data():
    for m in range(MICROBATCHES):
        tokens, labels = batch(seed=m, b=B)
        yield {"tokens": tokens, "labels": labels, "loss_mask": (labels != -100).double()}


def forward_step(iterator, model):
    part = next(iterator)
    output = model(part["tokens"], None, None, labels=part["labels"])

    def loss_func(losses):
        loss = (losses * part["loss_mask"]).sum() / part["loss_mask"].sum()
        return loss, {"lm loss": loss.detach()}

    return output, loss_func


def per_token_step(iterator, model):
    """Keywords, and the three values of newer scripts."""
    part = next(iterator)
    output = model(tokens=part["tokens"], labels=part["labels"])
    return output, lambda losses: (losses.sum(), part["loss_mask"].sum(), {"lm loss": losses.detach().sum()})


@cache
def reference():
    model = gpt("llama", parallel=ParallelState.single("cpu"), facts={"num_layers": 4})
    for part in data():
        losses = model(part["tokens"], labels=part["labels"])
        (losses.sum() / part["loss_mask"].sum() / MICROBATCHES).backward()
    return {n: p.grad[:VOCAB] if "embed" in n or "output" in n else p.grad for n, p in model.named_parameters()}


def chunks(ps, each, tied=False):
    facts = config("llama", num_layers=4)
    if each == 1:
        return GPTModel(facts, llama_spec(), VOCAB, POSITIONS, parallel=ps, share_embeddings_and_output_weights=tied)
    made = gpt_stages(facts, llama_spec(), VOCAB, POSITIONS, placement=looped(ps.size("pp"), each), parallel=ps)
    return list(made.values())


def run(step, pp, each, tp=1):
    ps = state(pp=pp, tp=tp)
    model = chunks(ps, each)
    iterators = data() if each == 1 else [data() for _ in model]
    forward_backward = get_forward_backward_func()
    facts = {"num_microbatches": MICROBATCHES, "seq_length": 8, "micro_batch_size": B}
    reports = forward_backward(forward_step_func=step, data_iterator=iterators, model=model, **facts)
    last = ps.is_last_stage
    assert len(reports) == (MICROBATCHES if last else 0)
    models = [model] if each == 1 else model
    for one in models:
        mine = {n: p for n, p in one.named_parameters()}
        if tp == 1:
            assert_same(
                {n: p.grad[:VOCAB] if "embed" in n or "output" in n else p.grad for n, p in mine.items()},
                {n: reference()[n] for n in mine},
            )
    again = forward_backward(
        forward_step_func=step,
        data_iterator=data() if each == 1 else [data() for _ in model],
        model=model,
        forward_only=True,
        **facts,
    )
    assert [r["lm loss"].item() for r in again] == pytest.approx([r["lm loss"].item() for r in reports])
    return [r["lm loss"].item() for r in reports]


@pytest.mark.parametrize("step", [forward_step, per_token_step])
@pytest.mark.parametrize("world, pp, each", [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 1)])
def test_a_step_in_megatrons_words(ranks, step, world, pp, each):
    ranks(run, step, pp, each, world=world)


def test_over_tensor_and_pipeline_ranks(ranks):
    alone = ranks(run, forward_step, 1, 1, world=1)[0]
    both = ranks(run, forward_step, 2, 1, 2, world=4)
    assert both[:2] == [[], []] and both[2] == both[3] == pytest.approx(alone)


def norms_of_two_updates(zero, pp, each=1):
    """With a grad_sync and the optimizer's step as docs/from_megatron.md has them; SGD, so that factors show."""
    ps = state(pp=pp)
    model = chunks(ps, each)
    shard = DataParallel(model if each == 1 else dict(enumerate(model)), ps, zero_stage=zero)
    optimizer = ShardedSGD(
        shard, OptimizerConfig(optimizer="sgd", lr=0.5, momentum=0.0, weight_decay=0.0, clip_grad=1.0)
    )
    replicas = ps.size("dp")
    mine = list(data())[ps.index("dp") * MICROBATCHES // replicas :]
    norms = []
    for _ in range(2):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine) if each == 1 else [iter(mine) for _ in model],
            model=model,
            num_microbatches=MICROBATCHES // replicas,
            grad_sync=shard,
        )
        norms.append(optimizer.step().grad_norm.item())
        optimizer.zero_grad()
    return norms


# the last two interleaved: chunks that the adapter wraps
@pytest.mark.parametrize(
    "zero, pp, each, world", [(0, 1, 1, 2), (1, 1, 1, 2), (3, 1, 1, 2), (1, 2, 1, 4), (1, 2, 2, 2), (3, 2, 2, 4)]
)
def test_a_step_without_num_tokens_is_by_the_mean_over_replicas(ranks, zero, pp, each, world):
    alone = ranks(norms_of_two_updates, 0, 1, world=1)[0]
    for norms in ranks(norms_of_two_updates, zero, pp, each, world=world):
        assert norms == pytest.approx(alone, rel=1e-9)


def sums_of_tokens():
    ps = state()
    model = chunks(ps, 1)
    shard = DataParallel(model, ps)
    optimizer = ShardedSGD(shard, OptimizerConfig(optimizer="sgd", lr=0.0, momentum=0.0, clip_grad=0.0))
    tokens = sum(float(part["loss_mask"].sum()) for part in data())
    norms = []
    for told, more in (("updates by a sum of losses over", {}), (None, {"num_tokens": tokens})):
        get_forward_backward_func()(
            forward_step_func=per_token_step,
            data_iterator=data(),
            model=model,
            num_microbatches=MICROBATCHES,
            grad_sync=shard,
            calculate_per_token_loss=True,
        )
        with pytest.warns(UserWarning, match=told) if told else warnings.catch_warnings(action="error"):
            norms.append(optimizer.step(**more).grad_norm.item())
        optimizer.zero_grad()
    assert norms[0] == pytest.approx(norms[1] * tokens, rel=1e-9)


def test_sums_of_tokens_that_nobody_divides_are_told(ranks):
    ranks(sums_of_tokens, world=1)


def more_steps():
    """The pipeline is kept between steps; copies of the model and other microbatch counts get their own."""
    ps = state()
    model = gpt("llama", parallel=ps, facts={"num_layers": 2, "hidden_dropout": 0.3})
    sync = PerParameterGradSync(model, ps)
    forward_backward, losses = get_forward_backward_func(), []

    def step(one, count=MICROBATCHES, **more):
        arguments = {"forward_step_func": forward_step, "data_iterator": data(), "model": one}
        return forward_backward(**arguments, num_microbatches=count, **more)

    for _ in range(2):
        losses.append(step(model, grad_sync=sync)[0]["lm loss"].item())
        kept = model.__dict__["_forward_backward"].pipeline
        sync.zero_grad()
    assert losses[0] != losses[1], "dropout goes on"
    assert kept.step_index == 2
    again = gpt("llama", parallel=ps, facts={"num_layers": 2, "hidden_dropout": 0.3})
    again.load_state_dict(model.state_dict())
    assert [step(again, step_index=number)[0]["lm loss"].item() for number in range(2)] == losses
    with pytest.raises(ValueError, match="step_index=-1 must be an integer of at least 0"):
        step(again, step_index=-1)
    assert copy.deepcopy(model).__dict__["_forward_backward"].pipeline is None
    step(model, 2, grad_sync=sync)
    assert model.__dict__["_forward_backward"].pipeline is not kept
    with pytest.raises(ValueError, match="2 data iterators for 1 model chunks"):
        forward_backward(
            forward_step_func=forward_step, data_iterator=[data(), data()], model=model, num_microbatches=1
        )
    for returned, told in (
        (lambda y: (y.sum(),), "loss_func returned 1 values; return"),
        (lambda y: y.sum(), "loss_func returned Tensor; return"),
        (
            lambda y: (y, {}),
            r"loss_func returned losses of shape \[\d+, \d+\], not 1 number: return \(their mean over",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            forward_backward(
                forward_step_func=lambda i, m, loss=returned: (m(next(i)["tokens"]).flatten(1), loss),
                data_iterator=data(),
                model=gpt("llama", parallel=ps),
                num_microbatches=1,
            )


def test_the_pipeline_is_kept_between_steps(ranks):
    ranks(more_steps, world=1)


def tied():
    """Without a GradSync the two ends of a tied table are summed."""
    ps = state(pp=2)
    model = chunks(ps, 1, tied=True)
    whole = gpt("llama", parallel=ParallelState.single("cpu"), tied=True, facts={"num_layers": 4})
    facts = {"forward_step_func": forward_step, "num_microbatches": MICROBATCHES}
    get_forward_backward_func()(data_iterator=data(), model=model, **facts)
    get_forward_backward_func()(data_iterator=data(), model=whole, **facts)
    name = "embedding.word_embeddings.weight"
    assert_same({name: model.get_parameter(name).grad}, {name: whole.get_parameter(name).grad})


def test_tied_ends(ranks):
    ranks(tied, world=2)


def replicas_without_a_sum():
    model = gpt("llama", parallel=state())
    arguments = {"forward_step_func": forward_step, "data_iterator": data(), "model": model, "num_microbatches": 1}
    with pytest.warns(UserWarning, match="on 2 data ranks: gradients stay each rank's own"):
        get_forward_backward_func()(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_forward_backward_func()(**arguments)  # told once
        get_forward_backward_func()(**arguments, forward_only=True)


def test_replicas_that_nobody_sums_are_told(ranks):
    ranks(replicas_without_a_sum)


def shuffled(seed):
    """A loader that draws its order when the first item is asked for."""
    tokens = torch.arange(MICROBATCHES * B * 8).view(-1, 8) % VOCAB
    pairs = [
        {"tokens": row, "labels": row.roll(-1), "loss_mask": torch.ones(8, dtype=torch.float64)} for row in tokens
    ]
    torch.manual_seed(seed)
    return iter(DataLoader(pairs, batch_size=B, shuffle=True))


def noisy_step(iterator, model):
    """Draws of a program's own beside the model's: which tokens are left out."""
    part = next(iterator)
    part["loss_mask"] = (torch.rand(part["tokens"].shape, dtype=torch.float64) > 0.3).double()
    return forward_step(iter([part]), model)


def losses_of_shuffled(pp, seed_of_rank):
    ps = state(pp=pp)
    model = chunks(ps, 1)
    losses = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(2):
            iterator = shuffled(step + seed_of_rank * ps.rank)
            arguments = {"forward_step_func": noisy_step, "data_iterator": iterator, "model": model}
            reports = get_forward_backward_func()(**arguments, num_microbatches=MICROBATCHES)
            losses.append([report["lm loss"].item() for report in reports])
        after = torch.rand(1).item()
    return losses, after, [str(w.message) for w in caught]


def test_what_a_forward_step_draws_is_the_same_on_every_stage(ranks):
    ((expected, after, _),) = ranks(losses_of_shuffled, 1, 0, world=1)
    first, last = ranks(losses_of_shuffled, 2, 0, world=2)
    assert len({loss for step in expected for loss in step}) == 2 * MICROBATCHES
    assert not first[2] and not last[2]
    assert first[1] == last[1] == after
    for found, wanted in zip(last[0], expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_stages_that_draw_other_batches_are_told(ranks):
    for _, _, told in ranks(losses_of_shuffled, 2, 7, world=2):
        assert len(told) == 1 and "both belong to one pipeline" in told[0], told
