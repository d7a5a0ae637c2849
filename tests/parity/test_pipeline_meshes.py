"""Pipelines with tensor and data parallelism around and inside the stages, and stages of any size anywhere."""

import itertools

import pytest
import torch

from core.models.gpt import GPTModel
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.layout import true_part
from core.pipeline import Action, Pipeline, Schedule
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from tests.marks import parts
from tests.parity.pipelines import LAYERS, VOCAB, S, batch, build, config, differences, policy, reference, run, spec
from tests.parity.whole import assembled
from tests.states import state

M, FEW = 3, 4  # microbatches of a replica, layers


def mesh_step(case):
    """(whole gradients, loss, norm) of one step on this rank's rows of the global batch."""
    tp, sp, dp, tied, style, schedule, recompute, dropout, masked = case
    ps = state(tp=tp, pp=2, sp=sp)
    placement = named.placement(schedule, 2)
    stages, sync = build(placement, ps, tied, dropout, style, FEW)
    layouts = {n: layout_of(p) for stage in stages.values() for n, p in stage.named_parameters()}
    mine = {k: v[ps.index("dp") * M :][:M] for k, v in batch(M * dp, masked).items()}
    facts = {"schedule": schedule, "recompute": policy(recompute, len(placement)), "num_microbatches": M}
    gradients, loss, norm = run(stages, sync, ps, mine, **facts)
    return assembled(gradients, layouts, ps), loss, norm


def one_process(dp, tied, style, dropout, masked):
    """`reference` without padded rows."""
    gradients, loss, norm = reference(M * dp, tied, dropout, 1, masked, style, FEW)
    made = {"share_embeddings_and_output_weights": tied, "parallel": ParallelState.single("cpu")}
    model = GPTModel(config(dropout, style, num_layers=FEW), spec(style), VOCAB, S, **made)
    cut = {n: true_part(gradients[n], layout_of(p), {}, {}) for n, p in model.named_parameters()}
    return cut, loss, norm


def compare_meshes(cases):
    wrong = {}
    for case in cases:
        _, _, dp, tied, style, _, _, dropout, masked = case
        found, want = mesh_step(case), one_process(dp, tied, style, dropout, masked)
        told = differences(found, want)
        if found[0].keys() != want[0].keys():
            told.append(f"names {found[0].keys() ^ want[0].keys()}")
        if told:
            wrong[case] = told
    return wrong


SCHEDULES = ["1f1b", "zb-v", "interleaved-zb"]
TENSOR = [
    (2, sp, 1, tied, style, schedule, recompute, 0.0, False)
    for sp, tied, style, schedule, recompute in itertools.product(
        (False, True), (False, True), ("llama", "gpt2"), [*SCHEDULES, "interleaved-1f1b"], ("none", "layer", "mixed")
    )
]
DATA = [
    (1, False, 2, tied, "llama", schedule, recompute, dropout, masked)
    for tied, schedule, recompute, dropout, masked in itertools.product(
        (False, True), SCHEDULES, ("none", "stage", "mixed"), (0.0, 0.1), (False, True)
    )
]


@pytest.mark.parametrize("cases", [TENSOR[::11], DATA[::17]], ids=["tensor", "data"])
def test_some_meshes_equal_one_process(ranks, cases):
    assert all(len({case[i] for case in cases}) > 1 for i in (3, 5, 6)), "both tied, several schedules, policies"
    assert ranks(compare_meshes, cases, world=4) == [{}] * 4


@pytest.mark.parametrize("cases", [*parts(TENSOR, 5, "tensor"), *parts(DATA, 5, "data")])
def test_meshes_equal_one_process(ranks, cases):
    assert ranks(compare_meshes, cases, world=4, timeout=300.0) == [{}] * 4


def replicas_alone(cases):
    """`NullGradSync`: gradients in `.grad`, not summed over replicas; the tied table's halves are summed, once."""
    wrong = {}
    for schedule, masked, steps in cases:
        ps = state(pp=2)
        placement = named.placement(schedule, 2)
        stages, sync = build(placement, ps, True)
        sync.remove()
        pipe = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=2)
        data = batch(2)
        if masked:
            data["labels"][:] = -100
        for _ in range(steps):
            pipe.step(data, next_token_loss)
        found = {n: p.grad for stage in stages.values() for n, p in stage.named_parameters()}
        want = reference(2, True, 0.0)[0]
        for name, got in found.items():
            expected = steps * want[name] * (not masked)
            got = torch.zeros_like(expected) if got is None and masked else got
            if (got - expected).abs().max() > 1e-10 * want[name].abs().max():
                wrong[schedule, masked, steps, name] = (got - expected).abs().max()
        pipe.close()
    return wrong


def test_tied_tables_without_a_grad_sync(ranks):
    cases = [
        (s, masked, steps) for s in ("1f1b", "zb-v", "zb-h1") for masked, steps in ((0, 1), (1, 1), (0, 3), (1, 2))
    ]
    assert ranks(replicas_alone, cases) == [{}] * 2


def rounds(ranks, microbatches, stages_per_rank=3):
    """A user's generator: a placement no one expects, forwards in waves, weight gradients at the very end."""
    placement = [*range(ranks), *reversed(range(ranks)), *range(ranks)][: ranks * stages_per_rank]
    orders = []
    for rank in range(ranks):
        mine = [s for s, owner in enumerate(placement) if owner == rank]
        turns = [(s, m) for s in mine for m in range(microbatches)]
        back = [(s, m) for s in reversed(mine) for m in range(microbatches)]
        orders.append(
            [Action("F", *t) for t in turns] + [Action("I", *t) for t in back] + [Action("W", *t) for t in back[::-1]]
        )
    return Schedule.make(placement, orders, "rounds")


UNEVEN = [range(0, 1), range(1, 4), range(4, 5), range(5, 6), range(6, 7), range(7, 8)]


def custom(kinds):
    """Placements and schedules of a user's own."""
    wrong = {}
    for kind in kinds:
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        ps, want, more = state(pp=world), reference(3, False, 0.1), {}
        if kind == "generator":
            schedule = rounds
            placement = named.placement(rounds, world)
            more = {"layers": UNEVEN if world == 2 else [*UNEVEN[:2], range(4, LAYERS)]}
        elif kind == "alone":  # several stages on the only rank
            placement, more = (0,) * 6, {"layers": UNEVEN}
            schedule = named.make("interleaved-zb", 1, 3, 6)
        else:  # backwards, one rank with a lot
            placement = tuple([world - 1 - s for s in range(world)] + [0] * 2)
            schedule = by_placement(placement, 3)
        stages, sync = build(placement, ps, False, 0.1, **more)
        found = run(stages, sync, ps, batch(3), num_microbatches=3, schedule=schedule, recompute="stage")
        if told := differences(found, want):
            wrong[kind] = told
    return wrong


def by_placement(placement, microbatches):
    """One microbatch after the other, all the way there and back."""
    orders = [[] for _ in set(placement)]
    for m in range(microbatches):
        for s, rank in enumerate(placement):
            orders[rank].append(Action("F", s, m))
        for s, rank in reversed(list(enumerate(placement))):
            orders[rank].append(Action("B", s, m))
    return Schedule.make(placement, orders, "one by one")


@pytest.mark.parametrize("world, kinds", [(1, ["alone", "generator"]), (2, ["generator", "backwards"])])
def test_custom_placements_and_schedules(ranks, world, kinds):
    assert ranks(custom, kinds, world=world) == [{}] * world


def test_uneven_generator_schedule_is_what_it_says():
    made = named.make(rounds, 2, 3)
    assert made.placement == (0, 1, 1, 0, 0, 1) and made.stages_of(1) == (1, 2, 5)
