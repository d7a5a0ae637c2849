"""A text sample: the likeliest tokens, the same on every layout, within the positions of the model."""

import pytest
import torch

from core.parallel_state import ParallelState
from core.training.generate import generate
from core.training.sampling import Sampling
from tests.models.gpt import POSITIONS, VOCAB, gpt
from tests.states import state

PROMPT = [5, 100, 3]


def made(ps=None, **more):
    return gpt("llama", parallel=ps or ParallelState.single("cpu"), facts={"dropout": 0.3}, **more)


def by_hand(model, prompt, count):
    tokens = list(prompt)
    model.eval()
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


def test_greedy_takes_the_likeliest_token_each_time():
    model = made()
    found = generate(model, PROMPT, new_tokens=6)
    assert model.training, "the mode is put back"
    assert found == generate(model, PROMPT, new_tokens=6) == by_hand(model, PROMPT, 6)
    assert found[:3] == PROMPT and len(found) == 9 and len(set(found[3:])) > 1
    assert generate(model, PROMPT, new_tokens=0) == PROMPT


def test_a_draw_depends_on_its_seed_and_leaves_the_users_random_state():
    model, before = made(), torch.get_rng_state()
    draws = [generate(model, PROMPT, new_tokens=8, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and all(0 <= t < VOCAB for draw in draws for t in draw)
    assert torch.equal(before, torch.get_rng_state())
    cold = generate(model, PROMPT, new_tokens=8, temperature=1e-4)
    assert cold == generate(model, PROMPT, new_tokens=8), "nearly no temperature is the likeliest token"


def test_it_stops_at_the_last_position():
    model = made()
    found = generate(model, PROMPT, new_tokens=1000)
    assert len(found) == POSITIONS
    assert generate(model, found, new_tokens=5) == found


@pytest.mark.parametrize("prompt", [[], [1] * (POSITIONS + 1)], ids=["empty", "too long"])
def test_a_bad_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match=f"the prompt has {len(prompt)} tokens, the model takes 1 to {POSITIONS}"):
        generate(made(), prompt, new_tokens=1)


def test_a_bad_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature=-1 must be at least 0"):
        generate(made(), PROMPT, new_tokens=1, temperature=-1)


def test_the_mode_is_put_back_after_an_error():
    model = made()
    with pytest.raises(ValueError, match="tokens holds"):
        generate(model, [VOCAB + 10_000], new_tokens=1)
    assert model.training


def here(tp, sp, parallel_output):
    model = made(state(tp=tp, sp=sp), parallel_output=parallel_output)
    return generate(model, PROMPT, new_tokens=40), generate(model, PROMPT, new_tokens=9, temperature=0.8, seed=4)


@pytest.mark.parametrize("tp, sp, parallel_output", [(2, True, True), (2, False, False), (4, True, True)])
def test_every_layout_gives_the_same_text(ranks, tp, sp, parallel_output):
    want = generate(made(), PROMPT, new_tokens=40), generate(made(), PROMPT, new_tokens=9, temperature=0.8, seed=4)
    assert ranks(here, tp, sp, parallel_output, world=tp) == [want] * tp


def few_positions():
    from core.models.gpt import GPTModel, llama_spec
    from tests.models.gpt import config

    model = GPTModel(config("llama"), llama_spec(), VOCAB, 7, parallel=state(tp=2, sp=True))
    with pytest.raises(ValueError, match="the prompt has 7 tokens, the model takes 1 to 6"):
        generate(model, [1] * 7, new_tokens=1)
    return len(generate(model, PROMPT, new_tokens=40))


def test_sequence_shards_of_an_odd_number_of_positions(ranks):
    assert ranks(few_positions) == [6, 6]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_pad_the_table_are_no_tokens(temperature):
    logits = torch.zeros(8)
    logits[6] = 9.0
    chosen = Sampling(temperature=temperature, vocab_size=5).choose(logits, torch.Generator().manual_seed(1))
    assert chosen < 5
    assert Sampling().choose(logits, torch.Generator()) == 6
