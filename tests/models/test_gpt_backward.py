"""Recomputation and deferred weight gradients of a whole GPT: nothing but memory and order may change."""

import pytest
import torch

from core.autograd import WeightGradBag, apply_recompute
from core.parallel_state import ParallelState
from tests.models.gpt import batch, gpt
from tests.parity.whole import assert_same
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync

MICROBATCHES = 3
POLICIES = ["layer", "selective", ["mlp"]]
DROPOUT = {"dropout": 0.2}


def gradients(model):
    """main_grad where there is one, and what autograd still holds in .grad."""
    found = {}
    for name, p in model.named_parameters():
        parts = [g for g in (getattr(p, "main_grad", None), p.grad) if g is not None]
        found[name] = torch.stack(parts).sum(0)
    return found


def one_after_the_other(model, step=5):
    """Loss and gradients of each microbatch in turn, B at once: the reference."""
    losses = []
    for m in range(MICROBATCHES):
        tokens, labels = batch(seed=m)
        model.stage.begin(seed=11, step=step, microbatch=m)
        loss = model(tokens, labels=labels).sum()
        loss.backward()
        losses.append(loss.detach())
    model.stage.release()
    return torch.stack(losses)


def forwards(model):
    """Counts how often each MLP runs."""
    count = {}
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            count[name] = 0
            module.activation = counting(module.activation, name, count)
    return count


def counting(fn, name, count):
    def counted(x):
        count[name] += 1
        return fn(x)

    return counted


def recomputed(style, policy, ps):
    plain = gpt(style, parallel=ps, tied=True, facts=DROPOUT)
    want = one_after_the_other(plain)
    model = gpt(style, parallel=ps, tied=True, facts=DROPOUT)
    count, handle = forwards(model), apply_recompute(model, policy, stage=model.stage)
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert torch.equal(one_after_the_other(model), want)
    runs = 1 if policy == "selective" else 2
    assert set(count.values()) == {runs * MICROBATCHES}, "each forward runs once more, not more often"
    found, reference = gradients(model), gradients(plain)
    for name, gradient in found.items():
        assert torch.equal(gradient, reference[name]), name
    handle.remove()
    assert not torch.equal(one_after_the_other(model, step=6), want), "dropout is drawn anew in each step"


def recomputed_here(style, policy):
    recomputed(style, policy, state(tp=2, sp=True))


@pytest.mark.parametrize("style", [pytest.param("gpt2", marks=pytest.mark.full), "llama"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_recomputation_gives_the_same_bits(ranks, style, policy):
    recomputed(style, policy, ParallelState.single("cpu"))
    ranks(recomputed_here, style, policy)


def test_recomputation_in_plain_use_draws_the_same_masks():
    """No executor: each forward draws a seed of its own, which the second run must find again."""
    found = []
    for policy in ("none", "layer"):
        model = gpt(parallel=ParallelState.single("cpu"), facts=DROPOUT, seed=1)
        apply_recompute(model, policy, stage=model.stage)
        torch.manual_seed(3)
        losses = [model(batch()[0], labels=batch()[1]).sum() for _ in range(2)]
        for loss in reversed(losses):  # the seed of the last forward is not that of the first
            loss.backward()
        assert losses[0] != losses[1]
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def deferred(style, ps, main_grad, policy):
    """F F F / I I I / W W W, each microbatch with a bag of its own, against F B F B F B."""
    plain, model = (gpt(style, parallel=ps, tied=True, facts=DROPOUT) for _ in range(2))
    syncs = [PerParameterGradSync(m, ps) for m in (plain, model)] if main_grad else []
    apply_recompute(model, policy, stage=model.stage)
    want = one_after_the_other(plain)
    bags, losses = [WeightGradBag() for _ in range(MICROBATCHES)], []
    for m, bag in enumerate(bags):
        tokens, labels = batch(seed=m)
        model.stage.begin(seed=11, step=5, microbatch=m, bag=bag)
        losses.append(model(tokens, labels=labels).sum())
    for m, (bag, loss) in enumerate(zip(bags, losses, strict=True)):
        model.stage.begin(seed=11, step=5, microbatch=m, bag=bag)
        loss.backward()
        # 4 matmuls a layer, and the table twice: as embedding and as output layer
        assert len(bag) == 4 * 2 + 2
    table = model.embedding.word_embeddings.weight
    assert not gradients(model)[table_name(model)].any() if main_grad else table.grad is None
    for bag in bags:
        bag.run()
        assert len(bag) == 0
    model.stage.release()
    assert torch.equal(torch.stack(losses), want)
    for sync in syncs:
        sync.finish()
    assert_same(gradients(model), gradients(plain), 1e-12)


def table_name(model):
    table = model.embedding.word_embeddings.weight
    return next(name for name, p in model.named_parameters() if p is table)


def deferred_here(*args):
    style, main_grad, policy = args
    deferred(style, state(tp=2, sp=True), main_grad, policy)


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("style, policy", [("gpt2", "none"), ("llama", "layer"), ("llama", "none")])
def test_weight_gradients_that_wait_are_the_same(ranks, style, main_grad, policy):
    deferred(style, ParallelState.single("cpu"), main_grad, policy)
    ranks(deferred_here, style, main_grad, policy)


def mixed_here(dtype):
    """bfloat16 weights with main_grad in float32: deferring may not round where the plain order does not."""
    ps = state(tp=2, sp=True)
    plain, model = (gpt("llama", parallel=ps, tied=True, facts={"params_dtype": dtype}) for _ in range(2))
    syncs = [PerParameterGradSync(m, ps) for m in (plain, model)]
    one_after_the_other(plain)
    bags = []
    for m in range(MICROBATCHES):
        tokens, labels = batch(seed=m)
        bags.append(WeightGradBag())
        model.stage.begin(seed=11, step=5, microbatch=m, bag=bags[-1])
        model(tokens, labels=labels).sum().backward()
    for bag in bags:
        bag.run()
    for sync in syncs:
        sync.finish()
    found, want = gradients(model), gradients(plain)
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert_same(found, want, 1e-5)


def test_weight_gradients_that_wait_keep_the_sum_wide(ranks):
    ranks(mixed_here, torch.bfloat16)
