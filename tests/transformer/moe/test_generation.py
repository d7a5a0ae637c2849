"""Text from a model with experts: one process's tokens on every layout."""

import pytest

from core.models.gpt import GPTModel, moe_spec
from core.parallel_state import ParallelState
from core.training.generation import generate_batch
from core.training.sampling import Sampling
from tests.states import state
from tests.transformer.moe.layouts import VOCAB, config

PROMPTS = [[5, 10, 3], [7], [9, 9, 9, 1, 2, 4]]
FACTS = {"layers": 3, "moe_layer_freq": (0, 1, 1), "router": "sigmoid", "shared": True, "balancing": "bias"}


def texts(ps):
    """Greedy and drawn, with and without kept keys."""
    model = GPTModel(config(**FACTS), moe_spec(), VOCAB, 24, parallel=ps, parallel_output=False)
    greedy = [generate_batch(model, PROMPTS, new_tokens=6, cache=cache) for cache in (True, False)]
    drawn = generate_batch(model, PROMPTS, new_tokens=6, sampling=Sampling(temperature=0.9, seed=3))
    return greedy[0], greedy[1], drawn


def here(layouts):
    return [texts(state(**layout)) for layout in layouts]


TWO = [{"expert": 2}, {"tp": 2, "expert": 2}]
MORE = [{"tp": 2, "expert": 2, "sp": True}, {"tp": 2}, {"cp": 2, "expert": 2}]
FOUR = [{"tp": 2, "expert": 4}, {"expert": 2}]


@pytest.mark.parametrize(
    "world, layouts",
    [(2, TWO), pytest.param(2, MORE, marks=pytest.mark.full), pytest.param(4, FOUR, marks=pytest.mark.full)],
)
def test_every_layout_gives_the_same_text(ranks, world, layouts):
    want = texts(ParallelState.single("cpu"))
    assert want[0] == want[1] != want[2]
    for found in ranks(here, layouts, world=world, timeout=300):
        assert found == [want] * len(layouts)


def other_texts():
    ps = state(expert=2)
    model = GPTModel(config(**FACTS), moe_spec(), VOCAB, 24, parallel=ps)
    for mine in (PROMPTS[ps.rank : ps.rank + 1], PROMPTS if ps.rank else []):
        with pytest.raises(ValueError, match="2 expert ranks are asked for 2 different sets of texts"):
            generate_batch(model, mine, new_tokens=3)


def test_expert_ranks_with_other_texts_are_refused(ranks):
    ranks(other_texts)
