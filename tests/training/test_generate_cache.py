"""Generation with keys and values kept: the tokens of the full prefix, each computed once, on every layout."""

import sys

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from core.models.gpt import GPTModel, gpt_stages, llama_spec
from core.models.huggingface import from_huggingface, load_huggingface
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, schedules
from core.training.generate import generate, generate_batch
from core.training.sampling import Sampling
from core.transformer.attention.kv_cache import KVCache, LayerCache
from tests.models.gpt import POSITIONS, VOCAB, config, gpt
from tests.models.huggingface import TODAY, exactly, random_model
from tests.models.test_huggingface import CONFIGS
from tests.states import state

PROMPTS = [[5, 100, 3], [7], [9, 9, 9, 1, 2, 4]]
HOT = Sampling(temperature=0.9, seed=3)


def made(style="llama", ps=None, **facts):
    return gpt(style, parallel=ps or ParallelState.single("cpu"), facts=facts)


def counted(model, monkeypatch):
    """Positions that the model ran, in each forward."""
    seen, forward = [], model.forward

    def count(tokens, *args, **kwargs):
        seen.append(tokens.numel())
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "forward", count)
    return seen


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("windows", [None, (3, None)])
def test_cached_is_uncached_and_runs_each_token_once(monkeypatch, style, windows):
    model = made(style, windows=windows)
    for sampling in (Sampling(), HOT):
        want = generate_batch(model, PROMPTS[:1], new_tokens=12, sampling=sampling, cache=False)
        with monkeypatch.context() as patch:
            seen = counted(model, patch)
            assert generate_batch(model, PROMPTS[:1], new_tokens=12, sampling=sampling) == want
        assert seen == [3] + [1] * 11


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("windows", [None, (3, None)])
def test_prompts_of_unequal_length_run_as_if_alone(style, windows):
    model = made(style, windows=windows)
    told = []
    for sampling in (Sampling(), HOT):
        alone = [
            generate_batch(
                model, [p], new_tokens=9, sampling=Sampling(**vars(sampling) | {"seed": sampling.seed + i})
            )
            for i, p in enumerate(PROMPTS)
        ]
        told.clear()
        together = generate_batch(
            model, PROMPTS, new_tokens=9, sampling=sampling, on_token=lambda row, token: told.append((row, token))
        )
        assert together == [text for (text,) in alone]
        assert [[t for row, t in told if row == i] for i in range(3)] == [
            text[len(p) :] for text, p in zip(together, PROMPTS, strict=True)
        ]
    assert generate_batch(model, [], new_tokens=3) == []


def test_texts_end_by_themselves():
    """At a stop token, and at the last position, while others go on."""
    model = made()
    free = generate_batch(model, PROMPTS, new_tokens=8)
    stop = free[0][5]
    ended = generate_batch(model, PROMPTS, new_tokens=8, stop=[stop])
    for text, whole, prompt in zip(ended, free, PROMPTS, strict=True):
        new = whole[len(prompt) :]
        cut = new.index(stop) + 1 if stop in new else len(new)
        assert text == prompt + new[:cut]
    long = [[1] * (POSITIONS - 2), [2, 3]]
    assert [len(text) for text in generate_batch(model, long, new_tokens=6)] == [POSITIONS, 8]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_fewest_candidates_are_the_likeliest(options):
    model = made()
    assert generate(model, PROMPTS[0], new_tokens=8, temperature=1.0, **options) == generate(
        model, PROMPTS[0], new_tokens=8
    )


def test_draws_are_from_the_likely_tokens():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**options):
        return {Sampling(temperature=1.0, **options).choose(logits, generator) for _ in range(300)}

    assert drawn() == {0, 1, 2, 3} and drawn(top_k=2) == {0, 1} and drawn(top_p=0.8) == {0, 1}
    assert drawn(top_p=0.81) == {0, 1, 2} and drawn(top_k=3, top_p=0.5) == {0}
    even = torch.zeros(4)
    assert len({Sampling(temperature=1.0, top_k=2).choose(even, generator) for _ in range(100)}) == 2
    with pytest.raises(ValueError, match="logits are NaN"):
        Sampling().choose(torch.tensor([0.0, torch.nan]), generator)
    with pytest.raises(ValueError, match="new_tokens=-3 must be at least 0"):
        generate(made(), PROMPTS[0], new_tokens=-3)
    for options, words in ({"top_k": 0}, "top_k=0 must"), ({"top_p": 0.0}, "top_p=0.0 must"):
        with pytest.raises(ValueError, match=words):
            Sampling(**options)


def test_a_full_cache_is_refused():
    layer = LayerCache(4, None)
    k = torch.zeros(1, 1, 3, 2)
    layer.extend(k, k)
    with pytest.raises(ValueError, match="a cache of 4 positions holds 3 tokens; 2 more do not fit"):
        layer.extend(k[:, :, :2], k[:, :, :2])


def test_the_model_is_as_it_was_after_an_error():
    model = made()
    with pytest.raises(RuntimeError, match="stop"), KVCache(4).used_by(model):
        assert model.decoder.layers[0].self_attention.cache_of_layer is not None
        raise RuntimeError("stop")
    assert all(layer.self_attention.cache_of_layer is None for layer in model.decoder.layers.values())


def on_a_layout(tp, pp, schedule, layers):
    ps = state(tp=tp, pp=pp)
    if pp == 1:
        model = made(ps=ps, num_query_groups=4)
        return generate_batch(model, PROMPTS, new_tokens=7), generate_batch(
            model, PROMPTS, new_tokens=7, sampling=HOT
        )
    placement = schedules.placement(schedule, pp)
    facts = config("llama", num_query_groups=4)
    stages = gpt_stages(facts, llama_spec(), VOCAB, POSITIONS, placement=placement, parallel=ps, layers=layers)
    executor = Pipeline(stages, ps=ps, schedule=schedule, num_microbatches=4)
    first = stages[min(stages)]
    with pytest.MonkeyPatch.context() as patch:
        # a token is an activation a stage, and a number: ranks exchange no objects, and no stage sees a text alone
        for collective in ("all_gather_object", "broadcast_object_list"):
            patch.setattr(torch.distributed, collective, None)
        return tuple(
            generate_batch(first, PROMPTS, new_tokens=7, sampling=sampling, executor=executor)
            for sampling in (Sampling(), HOT)
        )


@pytest.mark.parametrize(
    "tp, pp, schedule",
    [(2, 1, ""), pytest.param(4, 1, "", marks=pytest.mark.full), (1, 2, "1f1b"), (2, 2, "1f1b"), (1, 2, "zb-v")],
)
def test_every_layout_gives_the_same_tokens(ranks, tp, pp, schedule):
    model = made(num_query_groups=4)
    want = generate_batch(model, PROMPTS, new_tokens=7), generate_batch(model, PROMPTS, new_tokens=7, sampling=HOT)
    layers = [range(0), range(1), range(1, 2), range(2, 2)] if schedule == "zb-v" else None
    assert ranks(on_a_layout, tp, pp, schedule, layers, world=tp * pp) == [want] * (tp * pp)


@pytest.mark.parametrize("kind", [*TODAY, "gpt2"])
def test_greedy_tokens_are_those_of_transformers(kind):
    """float64; theirs through generate() with its own cache."""
    theirs = random_model({**CONFIGS, **TODAY}[kind]()).eval()
    model = GPTModel(
        **from_huggingface(theirs.config, params_dtype=torch.float64).arguments(),
        parallel=ParallelState.single("cpu"),
    )
    load_huggingface(model, theirs.state_dict())
    options = transformers.GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    with pytest.MonkeyPatch.context() as patch:
        exactly(patch)
        for prompt in ([5, 100, 3], [9, 9, 1, 2, 4, 77, 31, 8]):
            want = theirs.generate(torch.tensor([prompt]), generation_config=options, use_cache=True)[0].tolist()
            assert generate(model, prompt, new_tokens=12) == want


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def python_calls(run):
    """Calls of Python's and of C's functions."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def torch_operations(run):
    with Operations() as operations:
        run()
    return operations.count


@pytest.mark.parametrize("count", [torch_operations, python_calls])
def test_a_token_costs_no_more_operations_and_calls_than_theirs(count):
    """A token of a Llama of 8 layers, float32: where the products are small, the rest is what it takes."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).float().eval()
    arguments = from_huggingface(theirs.config, params_dtype=torch.float32).arguments()
    ours = GPTModel(**arguments, parallel=ParallelState.single("cpu")).eval()
    load_huggingface(ours, theirs.state_dict())

    def of_ours(new_tokens):
        generate_batch(ours, [[5, 6, 7]], new_tokens=new_tokens)

    def of_theirs(new_tokens):
        how = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
        )
        theirs.generate(torch.tensor([[5, 6, 7]]), generation_config=how)

    def of_a_token(generates):
        generates(2)
        return (count(lambda: generates(12)) - count(lambda: generates(4))) / 8

    mine, other = of_a_token(of_ours), of_a_token(of_theirs)
    assert 0 < mine <= other
    assert mine <= {torch_operations: 610, python_calls: 1400}[count]
