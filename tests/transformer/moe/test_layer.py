"""Routing, balancing, recomputation and counts of a layer with experts."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from benchmarks.harness import count_calls
from core.autograd import apply_recompute
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, moe_spec
from core.optimizer import OptimizerConfig, ShardedSGD
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from core.transformer.moe import balance, dispatch
from core.transformer.moe.router import Router
from tests.parity.whole import assert_same, whole_parameters
from tests.states import state
from tests.transformer.moe.layouts import ROUTERS, SEED, VOCAB, S, batch, config
from tests.twins.per_parameter import PerParameterGradSync


def model(parallel=None, **facts):
    return GPTModel(config(**facts), moe_spec(), VOCAB, S, parallel=parallel or ParallelState.single("cpu"))


def routings(made):
    """What the routers of a model choose from now on, in order."""
    found = []
    for module in made.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda module, given, routing: found.append(routing))
    return found


def auxiliary(routing, sequences, of_sequence, alpha, zeta):
    """The loss of a layer summed over its positions, as the papers have it."""
    experts = routing.scores.shape[1]
    scores = routing.scores.view(-1, sequences, experts)
    # of the k largest scores (DeepSeek-V3's 18): with groups others are chosen
    largest = routing.scores.topk(routing.experts.shape[1], dim=-1).indices
    chosen = F.one_hot(largest, experts).sum(1).view(-1, sequences, experts).to(scores.dtype)
    total = zeta * routing.logits.logsumexp(-1).square().sum()
    parts = [scores[:, [b]] for b in range(sequences)] if of_sequence else [scores]
    picks = [chosen[:, [b]] for b in range(sequences)] if of_sequence else [chosen]
    for score, pick in zip(parts, picks, strict=True):
        share = pick.mean((0, 1)) / routing.experts.shape[1]
        total = total + alpha * score.shape[0] * score.shape[1] * experts * (share * score.mean((0, 1))).sum()
    return total


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("balancing", ["microbatch", "sequence"])
def test_auxiliary_losses_are_the_papers(router, balancing):
    """Gradients of sum(loss) + sum(alpha aux + zeta z), by torch's autograd over what the routers gave."""
    facts = {"router": router, "balancing": balancing, "shared": router == "softmax"}
    zeta, alpha = (0.1, 0.3) if balancing == "microbatch" else (0.0, 0.3)
    plain = model(router=router, balancing="none", shared=facts["shared"])
    found = routings(plain)
    data = batch()
    loss = plain(data["tokens"], labels=data["labels"]).sum()
    extra = [auxiliary(r, len(data["tokens"]), balancing == "sequence", alpha, zeta) for r in found]
    (loss + sum(extra)).backward()
    want = {name: p.grad for name, p in plain.named_parameters()}

    ours = model(**facts)
    sync = PerParameterGradSync(ours, ours.parallel)
    executor = SingleStage(ours, ps=ours.parallel, grad_sync=sync, seed=SEED)
    result = executor.step(data, next_token_loss)
    assert result.loss_sum.item() == pytest.approx(loss.item(), rel=1e-12), "the loss itself has no part of them"
    assert_same({name: p.main_grad for name, p in ours.named_parameters()}, want)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_plain_loop_gives_them_the_scale_of_its_loss(factor):
    """A mean over valid tokens, times a factor (accumulation, a loss scale)."""
    data = batch()
    want = model(balancing="microbatch")
    executor = SingleStage(want, ps=want.parallel, seed=SEED)
    tokens = executor.step(data, next_token_loss).num_tokens
    ours = model(balancing="microbatch")
    losses = ours(data["tokens"], labels=data["labels"])
    (factor * losses.sum() / (data["labels"] != -100).sum()).backward()
    expected = {name: factor * p.grad / tokens for name, p in want.named_parameters()}
    assert_same({name: p.grad for name, p in ours.named_parameters()}, expected)


def test_a_loss_of_ones_own_is_told():
    ours = model(balancing="sequence")
    ours(batch()["tokens"], labels=batch()["labels"]).mean().backward()  # whose scale says nothing of the next one's
    with pytest.warns(UserWarning, match="taken for a mean over positions"):
        ours(batch()["tokens"]).logsumexp(-1).mean().backward()


def gradients(made, recompute="none"):
    apply_recompute(made, recompute, stage=made.stage)
    data = batch()
    made(data["tokens"], labels=data["labels"]).mean().backward()
    return {name: p.grad for name, p in made.named_parameters()}


@pytest.mark.parametrize("recompute", ["layer", "selective"])
def test_a_second_run_that_would_route_otherwise_takes_the_first_ones_choice(monkeypatch, recompute):
    want = gradients(model(balancing="sequence"))
    calls = Counter()
    chosen = Router._chosen

    def another_each_time(self, scores, logits):
        calls["router"] += 1
        return chosen(self, scores if calls["router"] <= 2 else -scores, logits)

    monkeypatch.setattr(Router, "_chosen", another_each_time)
    assert_same(gradients(model(balancing="sequence"), recompute), want)
    assert calls["router"] == 2, "one choice a layer"


@pytest.mark.parametrize("choice", [[0, 1], [3, 2], [0, 3]])
def test_experts_without_tokens(monkeypatch, choice):
    """All tokens go to the same two experts: the others get zeros, not NaN."""
    monkeypatch.setattr(
        Router, "_chosen", lambda self, scores, _: torch.tensor(choice).expand(len(scores), 2).contiguous()
    )
    found = gradients(model(balancing="sequence"))
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        if "experts.linear" in name:
            used = gradient.flatten(1).any(1)
            assert used.tolist() == [expert in choice for expert in range(4)]


def test_groups_leave_out_the_worst():
    router = model(router="groups").decoder.layers[0].mlp.router
    scores = torch.rand(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    experts = router._chosen(scores, scores)
    best = scores.view(50, 2, 2).sum(-1).argmax(-1)
    assert (experts // 2 == best[:, None]).all()


def test_groups_of_a_softmax_over_the_chosen_are_those_of_logits():
    """As Megatron's; sums of softmax scores would choose others. Balance counts the k largest scores."""
    router = model(router="groups").decoder.layers[0].mlp.router
    router.sigmoid = router.pre_softmax = False
    logits = 3 * torch.randn(500, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    experts = router._chosen(logits.softmax(-1), logits)
    assert (experts // 2 == logits.view(500, 2, 2).sum(-1).argmax(-1)[:, None]).all()
    assert not (experts // 2 == logits.softmax(-1).view(500, 2, 2).sum(-1).argmax(-1)[:, None]).all()
    assert not router.prefers_by_scores


def all_to_alls(recompute):
    """Exchanges over ep of a forward and of its backward."""
    ps = state(expert=2)
    made = model(ps, balancing="none")
    sync = PerParameterGradSync(made, ps)  # who sums the experts' gradients
    apply_recompute(made, recompute, stage=made.stage)
    data = {key: value[2 * ps.rank :][:2] for key, value in batch().items()}
    counted = Counter()

    def counting(exchange):
        def counted_exchange(x, group, **rows):
            counted["counts" if x.dtype == torch.int64 else "rows" if x.shape[-1] > 1 else "weights"] += 1
            return exchange(x, group, **rows)

        return counted_exchange

    with pytest.MonkeyPatch.context() as patch:
        for exchange in (dispatch.all_to_all, dispatch.start_all_to_all):
            patch.setattr(dispatch, exchange.__name__, counting(exchange))
        loss = made(data["tokens"], labels=data["labels"]).mean()
        forward = dict(counted)
        counted.clear()
        loss.backward()
    sync.zero_grad()
    return forward, dict(counted)


def test_a_second_run_exchanges_rows_only(ranks):
    """A layer: counts, rows there, weights there, outputs back; a second run: rows there, outputs back at most."""
    layers = 2
    for forward, backward in ranks(all_to_alls, "none"):
        assert forward == {"counts": layers, "rows": 2 * layers, "weights": layers}
        assert backward == {"rows": 2 * layers, "weights": layers}
    for forward, backward in ranks(all_to_alls, "layer"):
        assert forward == {"counts": layers, "rows": 2 * layers, "weights": layers}
        assert backward["weights"] == layers and "counts" not in backward
        assert backward["rows"] <= 2 * layers + 2 * layers


def order_of_one_forward():
    """What happens between sending rows of h numbers and waiting for them."""
    ps = state(expert=2)
    made = model(ps, balancing="none", shared=True, layers=1)
    happened, start = [], dispatch.start_all_to_all

    def noted(x, group, **rows):
        pending = start(x, group, **rows)
        happened.append("rows leave")

        class Noted:
            def wait(self):
                happened.append("rows are waited for")
                return pending.wait()

        return Noted()

    layer = made.decoder.layers[0].mlp
    layer.shared_experts.register_forward_hook(lambda *_: happened.append("shared experts"))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dispatch, "start_all_to_all", noted)
        made(batch()["tokens"][2 * ps.rank :][:2])
    return happened


def test_shared_experts_are_computed_while_rows_are_on_their_way(ranks):
    order = ["rows leave", "shared experts", "rows are waited for"]
    assert ranks(order_of_one_forward) == [order] * 2


def order_of_counts(recompute):
    """When the counts of the auxiliary loss leave, and when somebody waits for them."""
    ps = state(tp=2, sp=True)
    made = model(ps, balancing="sequence", layers=1)
    sync = PerParameterGradSync(made, ps)
    apply_recompute(made, recompute, stage=made.stage)
    happened, start = [], balance.start_all_reduce

    def noted(counts, group):
        pending = start(counts, group)
        happened.append("counts leave")

        class Noted:
            def wait(self):
                happened.append("counts are waited for")
                return pending.wait()

        return Noted()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "start_all_reduce", noted)
        loss = made(batch()["tokens"], labels=batch()["labels"]).mean()
        happened.append("backward")
        loss.backward()
    sync.zero_grad()
    return happened


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_counts_of_the_auxiliary_loss_are_waited_for_in_backward(ranks, recompute):
    assert ranks(order_of_counts, recompute) == [["counts leave", "backward", "counts are waited for"]] * 2


def test_what_a_layer_keeps():
    """Elements per token, beside parameters: k rows of h and 3 f each, the input, and what the router needs."""
    k, h, f, experts = 2, 64, 48, 4
    facts = {"hidden_size": h, "moe_ffn_hidden_size": f, "params_dtype": torch.float32}
    layer = model(**facts).decoder.layers[0].mlp
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter) and tensor.dtype.is_floating_point:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    tokens = 256
    x = torch.randn(tokens, 1, h, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert sum(kept.values()) / tokens <= k * (h + 3 * f) + 2 * h + 8 * experts + 8 * k


BAD = [
    ({"num_moe_experts": 0}, "num_moe_experts=0 must be at least 1"),
    ({"moe_router_topk": 5}, "moe_router_topk=5 must lie between 1 and num_moe_experts=4"),
    ({"moe_router_topk": 1}, "moe_router_topk=1 with a softmax over the 1 chosen expert"),
    ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "does not divide into moe_router_num_groups=3; valid"),
    ({"moe_router_num_groups": 2}, "belong together"),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "1 of 4 groups leave 1"),
    ({"moe_layer_freq": (1,)}, "moe_layer_freq names 1 layers, num_layers=2"),
    ({"moe_layer_freq": (1, 2)}, r"moe_layer_freq holds \[2\]"),
    ({"moe_layer_freq": (0, 0)}, "experts to none of num_layers=2 layers, with num_moe_experts=4"),
    ({"moe_aux_loss_coeff": -1.0}, "must not be negative"),
    ({"add_bias_linear": True}, "experts have no biases"),
    ({"moe_router_score_function": "tanh"}, "known: softmax, sigmoid"),
    (
        {"moe_expert_capacity_factor": 1.25},
        "moe_expert_capacity_factor=1.25: experts have no capacity here, .* leave",
    ),
    ({"num_moe_experts": None, "moe_shared_expert_intermediate_size": 8}, "without num_moe_experts"),
]


@pytest.mark.parametrize("facts, says", BAD)
def test_what_contradicts_is_refused(facts, says):
    with pytest.raises(ValueError, match=says):
        config(**facts)


def plain_loop():
    """Data ranks that hold other experts, and nobody who keeps them apart."""
    ps = state(expert=2)
    data = batch()
    with pytest.raises(ValueError, match=r"spread over expert=2 ranks, .* core.data_parallel.DataParallel"):
        model(ps)(data["tokens"], labels=data["labels"])


def test_a_plain_loop_over_expert_ranks_is_refused(ranks):
    ranks(plain_loop)


def torchs_clipping(zero):
    """Three steps with `torch.nn.utils.clip_grad_norm_`, on ranks that hold other experts and in one process."""
    ps, found, norms = state(expert=2), [], []
    for parallel in (ps, ParallelState.single("cpu")):
        made, mine = model(parallel), batch()
        if parallel is ps:
            mine = {key: value[2 * ps.rank :][:2] for key, value in mine.items()}
        shard = DataParallel(made, parallel, zero_stage=zero)
        optimizer = ShardedSGD(shard, OptimizerConfig(lr=0.05, clip_grad=0.0, weight_decay=0.0))
        for _ in range(3):
            factor = 1.0 if parallel is ps else 0.5  # gradients are means over replicas
            (factor * made(mine["tokens"], labels=mine["labels"]).sum()).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(made.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        shard.remove()
        found.append(whole_parameters(made, parallel))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-12)
    assert_same(*found)


@pytest.mark.parametrize(
    "zero", [0, pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_torchs_clipping_takes_the_norm_of_all_experts(ranks, zero):
    ranks(torchs_clipping, zero)


def norms_by_hand():
    """A norm of a weight of which expert ranks hold the rest."""
    ps = state(tp=2, expert=2)
    made, data = model(ps), batch()
    made(data["tokens"], labels=data["labels"]).mean().backward()
    with pytest.warns(UserWarning, match=r"norm by hand sees \[2, 2, 12, 16\] of .*experts.linear_fc1.weight"):
        made.decoder.layers[0].mlp.experts.linear_fc1.weight.norm()


def test_a_norm_of_some_experts_is_told(ranks):
    ranks(norms_by_hand)


def python_calls():
    """Of forward and backward, 4 layers, experts over the data ranks that are here. Without an optimizer, whose step
    calls a hook of every model that other tests keep."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    made, tokens = model(state(expert=world), layers=4), batch()["tokens"]
    if world > 1:
        PerParameterGradSync(made, made.parallel)  # who sums: without it a plain loop is refused
    return count_calls(lambda: made(tokens, labels=tokens.roll(-1, 1)).mean().backward())


@pytest.mark.parametrize("world, most", [(1, 1400), (2, 1800)])  # an optimizer adds some 150
def test_python_calls_of_forward_and_backward(ranks, world, most):
    for calls in ranks(python_calls, world=world):
        assert 300 < calls <= most, "below 300 the count itself is broken"
