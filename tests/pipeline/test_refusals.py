"""What a pipeline refuses when it is built: on every rank, whichever rank was given something else."""

import pytest
import torch
from torch import nn

from core.autograd import apply_recompute
from core.parallel_state.layout import Layout, set_layout
from core.pipeline import Action, Pipeline, PipelineError, Schedule
from core.pipeline.schedule import schedules as named
from tests.pipeline import tiny
from tests.twins.per_parameter import PerParameterGradSync


def told(**by_rank):
    """The ValueError of this rank; an argument given as a list of two is one for each rank."""
    ps = tiny.pipeline_state()
    facts = {k: v[ps.rank] if isinstance(v, tuple) else v for k, v in by_rank.items()}
    stages = facts.pop("stages", 1)
    with pytest.raises(ValueError) as error:
        Pipeline([tiny.part(s) for s in range(stages)], ps=ps, **{"num_microbatches": 4} | facts)
    return str(error.value)


TWO = named.make("1f1b", 2, 4)
RANKS_DIFFER = {
    "schedule": ({"schedule": ("1f1b", "gpipe")}, "ranks 0 and 1 were given different schedules"),
    "auto": ({"schedule": ("auto", "1f1b")}, "rank 0: schedule auto\nrank 1: schedule 1f1b"),
    "object": ({"schedule": (TWO, "1f1b")}, "rank 1: schedule 1f1b"),
    "microbatches": ({"num_microbatches": (4, 2)}, "rank 0: num_microbatches=4\nrank 1: num_microbatches=2"),
    "recompute": ({"recompute": ("none", "stage")}, "rank 0: recompute='none'\nrank 1: recompute='stage'"),
    "modules": ({"stages": (1, 2)}, "schedule '1f1b' places 2 stages on 2 ranks as (0, 1)"),
    "function": (
        {"schedule": (named.one_f_one_b, named.zb_h1)},
        "ranks 0 and 1 were given different schedules:\nrank 0: 1f1b",
    ),
}


@pytest.mark.parametrize("case", RANKS_DIFFER)
def test_ranks_that_differ_all_say_so(ranks, case):
    facts, text = RANKS_DIFFER[case]
    for rank, message in enumerate(ranks(told, **facts)):
        assert text in message
        assert case != "modules" or rank == 1 or message.startswith("rank 1 cannot build its part")


def edited(old, new, rank=0):
    """1f1b of two ranks with one word of one rank's order changed."""
    lines = TWO.text().splitlines()
    assert old in lines[1 + rank].split()
    lines[1 + rank] = " ".join(new if word == old else word for word in lines[1 + rank].split() if new or word != old)
    return Schedule.parse("\n".join(lines) + "\n")


BAD = {
    "misses": ({"schedule": edited("0B2", "")}, "misses 0I2: stage 0 (rank 0) never does I of microbatch 2"),
    "repeats": ({"schedule": edited("0F3", "0F3 0F2")}, "rank 0: 0F2 is repeated"),
    "elsewhere": ({"schedule": edited("1F0", "0F0", 1)}, "rank 1: 0F0 belongs to rank 0"),
    "order": ({"schedule": edited("0B0", "0W0 0I0")}, "0W0 comes before 0I0"),
    "ranks": ({"schedule": Schedule.make((0, 0), TWO.orders)}, "gives no stage to rank 1 of 2 ranks"),
    "other size": ({"schedule": named.make("1f1b", 4, 4)}, "places 4 stages on 4 ranks"),
    "count": ({"schedule": TWO, "num_microbatches": 5}, "misses 0F4"),
    "too many": ({"schedule": TWO, "num_microbatches": 3}, "is none of its 2 stages and 3 microbatches"),
    "none": ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
    "unknown": ({"schedule": "zbv"}, "did you mean 'zb-v'?"),
    "policies": ({"recompute": ["none"] * 3}, "recompute has 3 policies for 2 stages"),
    "policy": ({"recompute": "full"}, "recompute='full'"),
    "names": ({"recompute": ["none", ["attention"]]}, "'attention' matches no module"),
}
BAD["never ends"] = (
    {
        "schedule": Schedule.make(
            (0, 1),
            [[Action.parse(w) for w in row.split()] for row in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")],
        ),
        "num_microbatches": 2,
    },
    "never ends: rank 0 stops at 0B0 and waits for 1I0 of rank 1, rank 1 stops at 1F1",
)


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_on_every_rank(ranks, case):
    facts, text = BAD[case]
    for message in ranks(told, **facts):
        assert text in message


def left_alone():
    """A refused pipeline leaves the modules as they were, on the rank that refused and on the others."""
    ps = tiny.pipeline_state()
    module = tiny.part(0)
    with pytest.raises(ValueError, match="matches no module"):
        Pipeline([module], ps=ps, recompute=["none", ["attention"]])
    return [name for name, child in module.named_modules() if "forward" in child.__dict__]


def test_a_refused_pipeline_leaves_the_modules_alone(ranks):
    assert ranks(left_alone) == [[], []]


def main_grad(both):
    ps = tiny.pipeline_state()
    module = tiny.part(0)
    if both or ps.rank == 1:
        sync = PerParameterGradSync(module, ps)
    with pytest.raises(ValueError, match="have a main_grad but grad_sync is None"):
        Pipeline([module], ps=ps)
    if both or ps.rank == 1:
        sync.remove()
    Pipeline([module], ps=ps).close()


@pytest.mark.parametrize("both", [True, False])
def test_main_grad_without_its_owner_is_refused(ranks, both):
    ranks(main_grad, both)


class Layers(torch.nn.Module):
    def __init__(self, s):
        super().__init__()
        self.layers = torch.nn.ModuleList([tiny.part(s)])

    def forward(self, x):
        return self.layers[0](x)


def twice(recompute, schedule, applied):
    """R runs the whole stage again; what is recomputed inside would run three times."""
    if schedule == "with R":
        schedule = edited("0B0", "0R0 0B0")

    def make(s):
        module = Layers(s)
        if applied:
            apply_recompute(module, "layer")
        return module

    with pytest.raises(ValueError) as error:
        tiny.pipeline(schedule, 4, make, recompute=recompute)
    return str(error.value)


@pytest.mark.parametrize(
    "recompute, schedule, applied",
    [
        ("stage", "1f1b", True),
        ("layer", "with R", False),
        ("none", "with R", True),
        (["layer", "none"], "with R", False),
    ],
)
def test_recomputed_twice_is_refused(ranks, recompute, schedule, applied):
    for rank, message in enumerate(ranks(twice, recompute, schedule, applied)):
        assert "stage 0" in message or f"stage {rank}" in message
        assert "is recomputed as a whole" in message and "would run 3 times; use one of the two" in message


def batches():
    """One process: the failure itself, and the pipeline is as good as new."""
    pipe = tiny.pipeline("1f1b", 4)
    with pytest.raises(ValueError, match="a batch of 6 samples does not divide into num_microbatches=4"):
        pipe.step(tiny.rows(6), tiny.squares)
    with pytest.raises(ValueError, match=r"a loss of shape \(1, 6\), not 1 number"):
        pipe.step(tiny.rows(4), lambda out, _: (out, 1))
    with pytest.raises(ValueError, match="depends on 0 trainable parameters"):
        pipe.step(tiny.rows(4), lambda out, _: (out.detach().sum(), 1))
    assert pipe.step_index == 0
    pipe.step(tiny.rows(4), tiny.squares)


def test_a_single_process_sees_its_own_exception(ranks):
    batches()
    assert issubclass(PipelineError, RuntimeError)


def test_lazy_modules_and_lists_are_refused_with_the_remedy(single):
    with pytest.raises(ValueError, match="lazy modules get theirs from a forward"):
        Pipeline([nn.LazyLinear(4)], ps=single)
    ready = nn.LazyLinear(4)
    ready(torch.randn(1, 3))
    pipe = Pipeline([ready], ps=single, num_microbatches=2)
    pipe.step(torch.randn(4, 3), lambda y, _: (y.square().sum(), len(y)))
    with pytest.raises(ValueError, match="the batch is a list of 1"):
        pipe.step([torch.randn(4, 3)], lambda y, _: (y.square().sum(), len(y)))


def marked(schedule):
    """A parameter on the last rank that is marked as a tied table's: an end of 1f1b, in the middle of a V."""
    ps = tiny.pipeline_state()
    stages = [nn.Linear(4, 4) for _ in range(2 if schedule == "zb-v" else 1)]
    if ps.rank == 1:
        set_layout(stages[0].weight, Layout((4, 4), partial={"embedding"}))
    try:
        Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=4).close()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_tied_mark_where_no_end_is(ranks, schedule):
    for said in ranks(marked, schedule, world=2):
        assert bool(said) == (schedule == "zb-v")
        assert not said or 'weight is marked by partial={"embedding"} on pipeline rank 1' in said
