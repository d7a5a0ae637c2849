"""What a log is told of experts: the auxiliary losses' values, on every layout; and what a step pays for it."""

import pytest

from core.autograd import apply_recompute
from core.pipeline import SingleStage
from core.training import next_token_loss
from core.training.log.experts import loads_of
from core.transformer.moe import load
from tests.training.host_reads import host_reads
from tests.transformer.moe.layouts import BALANCING, SEED, batch, on_layout
from tests.transformer.moe.test_layer import auxiliary, model, routings

SCOPES = {
    "microbatch": {"balancing": "microbatch"},
    "sequence": {"balancing": "sequence"},
    "z only": {"balancing": "none", "moe_z_loss_coeff": 0.1},
    "none": {"balancing": "none"},
}


def step_of(made, microbatches=2):
    executor = SingleStage(made, ps=made.parallel, num_microbatches=microbatches, seed=SEED)
    executor.step(batch(), next_token_loss)


def told(made, microbatches=2):
    """What a log is told of one step."""
    tell = loads_of([made], made.parallel)
    made(batch()["tokens"])  # outside of the step
    step_of(made, microbatches)
    return tell()


@pytest.mark.parametrize("scope", SCOPES)
def test_losses_are_the_papers_means_over_positions(scope):
    """By torch over what the routers of a plain model gave, microbatch by microbatch."""
    facts = SCOPES[scope]
    made = model(**facts)
    found = routings(made)
    for rows in (slice(0, 2), slice(2, 4)):
        made(batch()["tokens"][rows])
    positions, of_sequence = batch()["tokens"].numel(), scope == "sequence"
    aux = [sum(auxiliary(r, 2, of_sequence, 1.0, 0.0) for r in found[layer::2]) / positions for layer in (0, 1)]
    z = [sum(auxiliary(r, 2, of_sequence, 0.0, 1.0) for r in found[layer::2]) / positions for layer in (0, 1)]
    for layer, of_layer in enumerate(told(model(**facts))):
        assert of_layer.layer == layer
        assert of_layer.aux == (pytest.approx(aux[layer].item()) if scope in ("microbatch", "sequence") else None)
        assert of_layer.z == (pytest.approx(z[layer].item()) if scope in ("microbatch", "z only") else None)


@pytest.mark.parametrize("recompute", ["layer", "selective"])
def test_a_forward_that_runs_again_is_told_once(recompute):
    made = model(balancing="microbatch")
    apply_recompute(made, recompute, stage=made.stage)
    assert told(made) == told(model(balancing="microbatch"))


def test_the_batch_before_gives_the_shares_of_the_global_loss():
    """Of the first step they are 1/E: the loss is 1."""
    assert [of_layer.aux for of_layer in told(model(balancing="global"))] == pytest.approx([1.0, 1.0])


ALONE = {"balancing": "microbatch", "router": "sigmoid", "layers": 4, "moe_layer_freq": (0, 1, 1, 1)}
TWO = [
    {"expert": 2, "recompute": "layer"},
    {"tp": 2, "expert": 2},
    {"pp": 2, "schedule": "zb-v", "recompute": "stage"},
]
MORE = [{"tp": 2, "sp": True}, {"cp": 2, "expert": 2}]


def one_step(zero=0, schedule="none", recompute="none", **sizes):
    stages, shard, executor, mine = on_layout(ALONE, zero, schedule, recompute, **sizes)
    tell = loads_of(stages.values(), shard.ps)
    shard.zero_grad()
    executor.step(mine, next_token_loss)
    return tell()


def on_layouts(layouts):
    return [one_step(**layout) for layout in layouts]


FOUR = [{"tp": 2, "expert": 4, "sp": True}, {"pp": 2, "expert": 2, "schedule": "1f1b"}]


@pytest.mark.parametrize(
    "world, layouts",
    [(2, TWO), pytest.param(2, MORE, marks=pytest.mark.full), pytest.param(4, FOUR, marks=pytest.mark.full)],
)
def test_every_layout_tells_the_same(ranks, world, layouts):
    """A sequence per microbatch, in one process too."""
    want = told(model(**ALONE), microbatches=4)
    assert [of_layer.layer for of_layer in want] == [1, 2, 3]
    for of_rank in ranks(on_layouts, layouts, world=world, timeout=300):
        for found in of_rank:
            for of_layer, expected in zip(found, want, strict=True):
                assert of_layer.layer == expected.layer
                assert (of_layer.busiest, of_layer.idlest) == (expected.busiest, expected.idlest)
                assert (of_layer.aux, of_layer.z) == pytest.approx((expected.aux, expected.z), rel=1e-12)


@pytest.mark.parametrize("balancing", BALANCING)
def test_counts_are_summed_over_ranks_where_they_change_something(monkeypatch, balancing):
    """A step of losses over microbatches or sequences exchanges no counts at its end, a log or not."""
    calls, plain = [], load.all_reduce
    monkeypatch.setattr(load, "all_reduce", lambda *given: calls.append(given) or plain(*given))
    made = model(balancing=balancing)
    tell = loads_of([made], made.parallel)
    step_of(made)
    assert len(calls) == (2 if balancing in ("global", "bias") else 0)  # over ep and edp
    tell()
    assert len(calls) > 0


def reads(is_logged):
    made = model(balancing="microbatch")
    if is_logged:
        loads_of([made], made.parallel)
    step_of(made)
    with host_reads() as found:
        step_of(made)
    return found


def test_a_log_waits_for_the_device_at_its_records_only():
    """A step reads tensors as often with a log as without one."""
    assert reads(True) == reads(False) != {}
