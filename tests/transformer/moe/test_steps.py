"""What balances experts over steps: a bias that chooses, and the counts of the global batch before."""

import copy
import warnings

import pytest
import torch

from core.models.gpt import GPTModel, moe_spec
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from core.transformer.moe.router import Router
from tests.parity.whole import assert_same
from tests.transformer.moe.layouts import COUNTED, SEED, VOCAB, S, batch, compare_after_steps, config, trained_alone

BIAS = {"balancing": "bias", "router": "sigmoid"}
GLOBAL = {"balancing": "global", "shared": True}
BOTH = {"balancing": "global", "router": "groups", "moe_router_enable_expert_bias": True, "moe_layer_freq": (0, 1)}
TWO = [
    (BIAS, {"expert": 2, "zero": 1, "recompute": "layer"}),
    (GLOBAL, {"tp": 2, "sp": True, "expert": 2, "recompute": "selective"}),
    (BOTH, {"pp": 2, "schedule": "zb-v", "recompute": "stage", "zero": 2, "layers": 4}),
]
FOUR = [
    (BOTH, {"tp": 2, "expert": 4, "zero": 2}),
    (BIAS, {"pp": 2, "expert": 2, "schedule": "1f1b", "recompute": "stage", "zero": 1}),
    (GLOBAL, {"cp": 2, "expert": 2, "zero": 3, "recompute": "layer"}),
]


def of_four_layers(facts, layout):
    if layout.pop("layers", 2) == 4:
        facts = facts | {"layers": 4, "moe_layer_freq": (0, 1, 1, 0)}
    return facts, layout


def compare(cases):
    """Weights, biases and counts after three steps; each case has some."""
    cases = [of_four_layers(facts, dict(layout)) for facts, layout in cases]
    for facts, _ in cases:
        counted = [value for name, value in trained_alone(**facts).items() if name.endswith(COUNTED)]
        assert any(value.any() for value in counted)
    compare_after_steps(cases)


@pytest.mark.parametrize("world, cases", [(2, TWO), (4, FOUR)])
def test_three_steps_are_one_processs(ranks, world, cases):
    ranks(compare, cases, world=world, timeout=300)


def model(**facts):
    return GPTModel(config(**facts), moe_spec(), VOCAB, S, parallel=ParallelState.single("cpu"))


def routers(made):
    return [module for module in made.modules() if isinstance(module, Router)]


def step(made, **how):
    executor = SingleStage(made, ps=made.parallel, seed=SEED, **how)
    executor.step(batch(), next_token_loss)
    return executor


def test_the_bias_chooses_and_does_not_weigh():
    """By the paper: the k largest of score + bias, weights of the scores; then rate x sign(mean - count)."""
    made = model(**BIAS)
    router = routers(made)[0]
    router.expert_bias.copy_(torch.tensor([10.0, 0.0, 0.0, -10.0]))
    x = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routing = router(x)
    assert (routing.experts[:, 0] == 0).all() and not (routing.experts == 3).any()
    scores = (x @ router.weight.t()).sigmoid().gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, 1.5 * scores / scores.sum(1, keepdim=True))
    before = router.expert_bias.clone()
    router.end_step(torch.tensor([30, 20, 10, 20]))
    torch.testing.assert_close(router.expert_bias - before, torch.tensor([-0.02, 0.0, 0.02, 0.0]))
    # frozen, as under LoRA, it stays
    router.weight.requires_grad_(False)
    moved = router.expert_bias.clone()
    router.end_step(torch.tensor([30, 20, 10, 20]))
    assert torch.equal(router.expert_bias, moved)


def test_a_step_counts_each_row_once():
    """k rows a token, whatever is recomputed, and nothing of what ran outside of the step."""
    for recompute in ("none", "layer", "selective"):
        from core.autograd import apply_recompute

        made = model(**GLOBAL)
        apply_recompute(made, recompute, stage=made.stage)
        made(batch()["tokens"])  # in training mode, before the step
        executor = step(made, num_microbatches=2)
        for router in routers(made):
            assert router.rows_of_last_step.sum() == batch()["tokens"].numel() * router.top_k, recompute
        counted = [router.rows_of_last_step.clone() for router in routers(made)]
        executor.evaluate(batch(), next_token_loss)
        assert all(torch.equal(a, b.rows_of_last_step) for a, b in zip(counted, routers(made), strict=True))


def test_the_first_global_batch_counts_for_nothing_and_the_next_for_the_one_before():
    """f is 1/E at first, so that aux is a constant; then the shares of the batch before, whatever this one's are."""
    plain, made = model(balancing="none"), model(balancing="global")
    step(plain), step(made)
    assert_same({n: p.grad for n, p in made.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    shares = [router.rows_of_last_step / router.rows_of_last_step.sum() for router in routers(made)]
    found = []
    hooks = [router.register_forward_hook(lambda module, given, out: found.append(out)) for router in routers(plain)]
    loss = plain(batch()["tokens"], labels=batch()["labels"]).sum()
    aux = sum(0.3 * 4 * (routing.scores * share).sum() for routing, share in zip(found, shares, strict=True))
    want = torch.autograd.grad(loss + aux, list(plain.parameters()))
    for hook in hooks:
        hook.remove()
    made.zero_grad()
    step(made)
    found = {name: p.grad for name, p in made.named_parameters()}
    assert_same(found, dict(zip(found, want, strict=True)))


def test_a_plain_loop_ends_its_steps_itself_or_is_told():
    made = model(**BIAS)
    optimizer = torch.optim.SGD(made.parameters(), 0.1)

    def once():
        for part in (0, 2):  # accumulation: nothing to tell
            made(batch()["tokens"][part : part + 2], labels=batch()["labels"][part : part + 2]).mean().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once()
        made.end_step()
        assert all(router.expert_bias.any() for router in routers(made))
        once()
    with pytest.warns(UserWarning, match=r"Call model.end_step\(\) after each optimizer.step\(\)"):
        once()


def test_buffers_stay_in_float32_and_are_copied_and_begin_at_zero():
    made = model(**BIAS).bfloat16()
    assert made.state_dict()["decoder.layers.0.mlp.router.expert_bias"].dtype == torch.float32
    twin = copy.deepcopy(model(**BIAS))
    step(twin)
    assert routers(twin)[0].expert_bias.any() and twin.stage.listeners[0].routers[0] is routers(twin)[0]
    with torch.device("meta"):
        empty = model(**BIAS)
    empty.to_empty(device="cpu").init_weights()
    assert not routers(empty)[0].expert_bias.any() and routers(empty)[0].expert_bias.dtype == torch.float32


def test_logits_that_are_not_finite_are_refused_by_layer():
    made = model()
    with torch.no_grad():
        made.decoder.layers[1].mlp.router.weight[2] = torch.nan
    with pytest.raises(ValueError, match=r"layers.1: the router's logits are not finite"):
        made(batch()["tokens"])


def broken_on_one_rank():
    """A rank whose tokens are not finite stops the ranks that exchange rows with it, too."""
    from core.data_parallel import DataParallel
    from tests.states import state

    ps = state(expert=2)
    made = GPTModel(config(), moe_spec(), VOCAB, S, parallel=ps)
    shard = DataParallel(made, ps)
    if ps.rank == 1:
        made.decoder.layers[0].register_forward_hook(lambda module, given, x: x * torch.inf)
    with pytest.raises(ValueError, match=r"layers.1: .* tokens of 1 expert ranks \(1\)"):
        made(batch()["tokens"])
    shard.remove()


def test_logits_of_one_rank_stop_its_peers(ranks):
    ranks(broken_on_one_rank)
