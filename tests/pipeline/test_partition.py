"""Layers to stages: as good as the best of all cuts, and what a GPT makes of it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.models.gpt import gpt_stages
from core.models.gpt.stages import split_layers
from core.parallel_state import ParallelState
from core.pipeline.schedule.partition import even, partition
from tests.parity.pipelines import VOCAB, S, config, spec

COSTS = st.lists(st.floats(0, 100), min_size=1, max_size=9)


def loads(cut, costs, first, last):
    found = [sum(costs[i] for i in part) for part in cut]
    found[0] += first
    found[-1] += last
    return found


@settings(max_examples=150, deadline=None)
@given(COSTS, st.integers(1, 9), st.floats(0, 50), st.floats(0, 50))
def test_no_cut_is_better(costs, stages, first, last):
    if stages > len(costs):
        with pytest.raises(ValueError, match=f"{len(costs)} layers do not fill {stages} stages"):
            partition(costs, stages)
        return
    cut = partition(costs, stages, first=first, last=last)
    assert [n for part in cut for n in part] == list(range(len(costs))) and all(cut) and len(cut) == stages
    best = min(
        max(loads([range(a, b) for a, b in itertools.pairwise((0, *ends, len(costs)))], costs, first, last))
        for ends in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(loads(cut, costs, first, last)) <= best * (1 + 1e-9) + 1e-9


def test_what_is_left_free_is_even():
    assert partition([1] * 8, 4) == even(8, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [len(part) for part in partition([1] * 8, 4, last=1)] in ([2, 2, 2, 2], [3, 2, 2, 1])
    assert [len(part) for part in partition([1] * 9, 3, first=1, last=2)] == [3, 4, 2]
    assert [len(part) for part in even(7, 3)] == [2, 2, 3]


@pytest.mark.parametrize(
    "costs, stages, told",
    [
        ([], 1, "0 layers do not fill 1 stages"),
        ([1.0], 0, "use 1 to 1 stages"),
        ([1.0, -2.0], 1, "must not be negative, got -2"),
    ],
)
def test_bad_arguments_are_refused(costs, stages, told):
    with pytest.raises(ValueError, match=told):
        partition(costs, stages)


def test_a_big_vocabulary_makes_the_last_stage_short():
    model = config(num_layers=8)
    small, big = (split_layers(model, vocab, S, 4) for vocab in (8, 1000))
    assert [len(part) for part in small] == [2, 2, 2, 2] and len(big[-1]) == 1 and sum(map(len, big)) == 8
    assert split_layers(model, 8, S, 2, [8.0] + [1.0] * 8) == [range(0, 1), range(1, 8)]
    with pytest.raises(ValueError, match="8 costs for num_layers=8; give one for each layer and one for the output"):
        split_layers(model, 8, S, 2, [1.0] * 8)


def made(placement, **more):
    facts = {"placement": placement, "parallel": ParallelState.single("cpu")}
    return gpt_stages(config(num_layers=4), spec(), VOCAB, S, **facts | more)


@pytest.mark.parametrize(
    "placement, more, told",
    [
        ((0, 1), {}, r"is for ranks \[0, 1\], the grid has 1 pipeline ranks"),
        ((), {}, "the grid has 1 pipeline ranks"),
        ((0, 0), {"layers": [range(0, 2), range(3, 4)]}, "together they must be 0 to 3, in order"),
        ((0, 0), {"layers": [range(2, 4), range(0, 2)]}, "together they must be 0 to 3, in order"),
        ((0, 0), {"layers": [range(0, 4)]}, "are 1 parts for 2 stages"),
        ((0,) * 5, {}, "4 layers do not fill 5 stages"),
    ],
)
def test_stages_of_a_gpt_that_do_not_fit_are_refused(placement, more, told):
    with pytest.raises(ValueError, match=told):
        made(placement, **more)


def test_stages_of_a_gpt_hold_their_layers_under_global_names():
    stages = made((0, 0, 0), layers=[range(0, 1), range(1, 3), range(3, 4)])
    assert [list(stage.decoder.layers.keys()) for stage in stages.values()] == [["0"], ["1", "2"], ["3"]]
    tied = made((0, 0), share_embeddings_and_output_weights=True)
    names = [set(dict(stage.named_parameters())) for stage in tied.values()]
    assert len({p for stage in tied.values() for p in stage.parameters()}) == len(names[0] | names[1]), "one table"
