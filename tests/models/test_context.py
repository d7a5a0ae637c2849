"""A GPTModel over context ranks beside training: what it refuses, dropout, generation, Hugging Face, checkpoints."""

import dataclasses
import itertools
import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt2_spec, gpt_stages, llama_spec
from core.models.huggingface import canonical, from_huggingface, load_huggingface
from core.parallel_state import ContextRows, ParallelConfig, ParallelState, context_batch
from core.parallel_state.collectives import all_gather_objects
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules
from core.training import next_token_loss
from core.training.generation import generate_batch
from core.transformer import TransformerConfig
from core.transformer.attention.self_attention import CoreAttention
from core.transformer.rules import check_layout
from tests.context_parallel.rows import documents
from tests.models.huggingface import TODAY, exactly, random_model
from tests.parity.shards import whole_gradients
from tests.parity.whole import assert_same
from tests.states import state

S, VOCAB = 16, 61


def small(**more):
    facts = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "attention_dropout": 0.0}
    return TransformerConfig(**facts | {"hidden_dropout": 0.0} | more)


class Foreign(CoreAttention):
    """A user's own, which says nothing of context ranks; it would inherit that its base class knows them."""

    def forward(self, q, k, v, attention_mask=None):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "facts, how, part, message",
    [
        (
            {"attention_dropout": 0.1},
            {"context": 2},
            CoreAttention,
            "attention_dropout=0.1 with context=2.*use",
        ),
        (
            {},
            {"context": 3, "cp_comm_type": "a2a"},
            CoreAttention,
            "num_attention_heads=4 .* leaves 4 .* the 3",
        ),
        (
            {"num_query_groups": 2},
            {"context": 4, "cp_comm_type": "a2a", "tensor": 2},
            CoreAttention,
            "num_query_groups=2 over tensor=2 ranks leaves 1 .* valid: 1, or cp_comm_type=p2p or all_gather",
        ),
        ({}, {"context": 2}, Foreign, "core_attention=Foreign does not say that it knows context=2 .*knows_context"),
    ],
)
def test_models_that_do_not_fit_are_refused_before_any_process(facts, how, part, message):
    with pytest.raises(ValueError, match=message):
        check_layout(small(**facts), ParallelConfig(**how), dataclasses.replace(gpt2_spec(), core_attention=part))


@pytest.mark.parametrize(
    "how, message",
    [
        ({"context": 2, "cp_comm_type": "ring"}, "unknown cp_comm_type 'ring'; known: all_gather, p2p, a2a, a2a"),
        ({"context": 4, "ulysses": 2}, "ulysses=2 with cp_comm_type=all_gather: 1 of context=4"),
        ({"context": 8, "cp_comm_type": "a2a+p2p", "ulysses": 3}, "ulysses=3 .* context=8 ranks; valid: 2, 4"),
        ({"context": 4, "cp_comm_type": "a2a+p2p", "ulysses": 2, "expert": 2}, "would need 9 groups per rank"),
    ],
)
def test_ways_of_exchanging_keys_are_checked_as_numbers(how, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**how)


def refusals():
    """Messages of batches that no model over context ranks takes."""
    ps = state(cp=2)
    model = GPTModel(small(params_dtype=torch.float64), llama_spec(), VOCAB, S, parallel=ps, seed=1)
    whole = {"tokens": torch.arange(2 * S).view(2, S) % VOCAB}
    mine = context_batch(whole, ps)
    begin, rows = torch.zeros(2, S // 2, dtype=torch.int64), mine["position_ids"]
    mask = torch.zeros(2, 1, S // 2, S // 2, dtype=torch.bool)
    longer = GPTModel(small(params_dtype=torch.float64), llama_spec(), VOCAB, 2 * S, parallel=ps, seed=1)
    tries = {
        "without positions": lambda: model(mine["tokens"]),
        "bool mask": lambda: model(**mine, attention_mask=mask),
        "whole sequences": lambda: model(whole["tokens"], torch.arange(S).expand(2, S)),
        "whole sequences in a longer model": lambda: longer(whole["tokens"], torch.arange(S).expand(2, S)),
        "after its token": lambda: model(**mine, document_begin=rows + 1),
        "decreasing": lambda: model(**mine, document_begin=torch.where(rows == rows[0, 1], rows, begin)),
        "another shape": lambda: model(**mine, document_begin=begin[:1]),
        "mask in a batch": lambda: context_batch(whole | {"attention_mask": mask}, ps),
        "s does not divide": lambda: context_batch({"tokens": torch.zeros(1, 6, dtype=torch.int64)}, ps),
        "unknown entry": lambda: context_batch(whole | {"weights": torch.zeros(2, S)}, ps),
    }
    messages = {}
    for name, attempt in tries.items():
        with pytest.raises(ValueError) as error:
            attempt()
        messages[name] = str(error.value)
    return messages


def test_batches_that_would_be_wrong_are_refused_with_the_remedy(ranks):
    told = ranks(refusals, world=2)[0]
    expected = {
        "without positions": "context_batch(batch, ps) cuts a batch",
        "bool mask": "give document_begin",
        "whole sequences": "max_sequence_length=16 (16 on each of 2 context ranks; context_batch cuts",
        "whole sequences in a longer model": "2 context ranks were given the same 16 rows",
        "after its token": "document_begin[0, 0] is 1 for row 0",
        "decreasing": "begins never decrease",
        "another shape": "document_begin must be int64 [b, s] = (2, 8)",
        "mask in a batch": "give document_begin",
        "s does not divide": "sequence length 6 is not a multiple of 2 x context(2) = 4; use 4 or 8",
        "unknown entry": "weights: context_batch does not know",
    }
    assert {name: text in told[name] for name, text in expected.items()} == dict.fromkeys(expected, True), told


def masks():
    """Dropout masks of this context rank's tokens, by what they zero."""
    ps = state(cp=2)
    facts = small(params_dtype=torch.float64, hidden_dropout=0.5)
    model = GPTModel(facts, llama_spec(), VOCAB, S, parallel=ps, seed=1)
    model.stage.begin(seed=1, step=0, microbatch=0)
    dropped = model.decoder.layers[0].mlp_dropout(torch.ones(S // 2, 2, 16))
    return all_gather_objects(dropped, ps.group("cp"))


def test_context_ranks_draw_other_masks(ranks):
    first, second = ranks(masks, world=2)[0]
    assert not torch.equal(first, second)


def generated(cp):
    ps = state(cp=cp)
    facts = small(params_dtype=torch.float64, init_method_std=0.5, num_query_groups=2)
    model = GPTModel(facts, llama_spec(), VOCAB, S, parallel=ps, seed=1)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    return [generate_batch(model, prompts, new_tokens=6, cache=cache) for cache in (True, False)]


def test_generation_is_that_of_one_process(ranks):
    (expected,) = ranks(generated, 1, world=1)
    assert ranks(generated, 2, world=2) == [expected] * 2


HF_S, HF_CUTS = 24, ([3, 4, 12], [17])  # a document of one token, a cut on an edge of chunks


@cache
def transformers_alone(kind, packed):
    """(weights, logits in order, loss, gradients by our names); of packed rows each document is run by itself."""
    hf = TODAY[kind]()
    model = random_model(hf)
    tokens = torch.randint(hf.vocab_size, (2, HF_S + 1), generator=torch.Generator().manual_seed(3))
    labels, logits = tokens[:, 1:], []
    with pytest.MonkeyPatch.context() as patch:
        exactly(patch)
        for row, cuts in zip(tokens[:, :-1], HF_CUTS if packed else ([], []), strict=True):
            edges = [0, *cuts, HF_S]
            alone = [model(row[None, a:b]).logits for a, b in itertools.pairwise(edges)]
            logits.append(torch.cat(alone, 1))
        logits = torch.cat(logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
    gradients = canonical({n: p.grad for n, p in model.named_parameters()}, from_huggingface(hf).config)
    rows = {"tokens": tokens[:, :-1], "labels": labels}
    if packed:
        begin = documents(HF_S, HF_CUTS)
        rows |= {"document_begin": begin, "position_ids": torch.arange(HF_S) - begin}
    return model.state_dict(), rows, logits.detach(), loss.item(), gradients


def against_transformers(kind, cp, comm_type, packed):
    weights, whole, logits, loss, gradients = transformers_alone(kind, packed)
    ps = state(cp=cp, cp_comm_type=comm_type)
    model = GPTModel(**from_huggingface(TODAY[kind](), params_dtype=torch.float64).arguments(), parallel=ps)
    load_huggingface(model, weights)
    shard = DataParallel({0: model}, ps)
    executor = SingleStage(model, ps=ps, grad_sync=shard)
    mine = context_batch(whole, ps)
    found = executor.forward({name: value for name, value in mine.items() if name != "labels"})
    rows = ContextRows.of_state(ps).rows(HF_S)
    assert (found - logits[:, rows]).abs().max() <= 1e-10 * logits.abs().max()
    result = executor.step(mine, next_token_loss)
    assert abs(result.loss_sum.item() - loss) <= 1e-10 * abs(loss)
    assert_same(whole_gradients(shard), gradients, 1e-9)


def hooked_in_executor(of_hidden, pp, recompute):
    """What is told of a loss with hidden states that a hook was given."""
    ps, kept = state(cp=2, pp=pp), []
    model = GPTModel(small(params_dtype=torch.float64), llama_spec(), VOCAB, S, parallel=ps)
    part = model.decoder.final_layernorm if ps.is_last_stage else model.decoder.layers[0]
    part.register_forward_hook(lambda module, args, output: kept.append(output))
    tokens, labels = torch.randint(VOCAB, (2, 2, S), generator=torch.Generator().manual_seed(1))
    whole = {"tokens": tokens, "labels": labels, "position_ids": torch.arange(S).expand(2, -1)}

    def loss(output, batch):
        total, count = next_token_loss(output, batch)
        return total + count * OF_HIDDEN[of_hidden](kept[-1]), count

    if pp == 1:
        executor = SingleStage(model, ps=ps)
    else:
        executor = Pipeline([model], ps=ps, schedule="zb-h1", num_microbatches=2, recompute=recompute)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        executor.step(context_batch(whole, ps), loss)
    # pipelines have a word of their own about activations that a loss takes from inside
    return [text for w in caught if (text := str(w.message)).startswith("context parallelism")]


OF_HIDDEN = {"pooled": lambda h: h.mean(0).tanh().sum(), "penalty": lambda h: 0.1 * h.pow(2).mean()}


@pytest.mark.parametrize("pp, recompute", [(1, "none"), (2, "none"), (2, "stage")])
def test_what_an_executors_loss_makes_of_hooked_hidden_states_is_told(ranks, pp, recompute):
    pooled = ranks(hooked_in_executor, "pooled", pp, recompute, world=2 * pp)
    assert sorted(map(len, pooled)) == [0] * (2 * pp - 2) + [1, 1]  # on the last stage's ranks
    assert all("counts otherwise" in message for found in pooled for message in found)
    assert not any(ranks(hooked_in_executor, "penalty", pp, recompute, world=2 * pp))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "kind, cp, comm_type",
    [
        ("llama3", 2, "all_gather"),
        ("qwen3", 2, "p2p"),
        ("llama3", 4, "p2p"),
        ("qwen3", 4, "all_gather"),
        pytest.param("mistral", 2, "a2a", marks=pytest.mark.full),
        pytest.param("gemma3-scaled", 2, "all_gather", marks=pytest.mark.full),
        pytest.param("smollm3-window", 4, "p2p", marks=pytest.mark.full),
        pytest.param("deepseek_v3", 2, "a2a", marks=pytest.mark.full),
        pytest.param("deepseek_v3", 4, "p2p", marks=pytest.mark.full),
    ],
)
def test_transformers_agrees_also_with_each_document_alone(ranks, kind, cp, comm_type, packed):
    ranks(against_transformers, kind, cp, comm_type, packed, world=cp)


def loss_of_preferences(output, microbatch):
    """SimPO's: rows 2 i chosen, 2 i + 1 rejected, a sigmoid of the difference of their means."""
    means = -output.mean(1)
    values = -torch.nn.functional.logsigmoid(20.0 * (means[0::2] - means[1::2]) - 0.5)
    return values.sum(), len(values)


def loss_of_hardest(output, microbatch):
    count = output.numel() // 2
    return output.flatten().topk(count).values.sum(), count


def loss_of_tokens(output, microbatch):
    return output.sum(), output.numel()


def said_by_an_executor(loss_fn, pp):
    ps = state(cp=2, pp=pp)
    tokens = torch.arange(4 * 16).view(4, 16) % VOCAB
    rows = context_batch({"tokens": tokens, "labels": tokens.roll(-1, 1)}, ps)
    config = small(num_layers=2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        if pp == 1:
            model = GPTModel(config, llama_spec(), VOCAB, 16, parallel=ps)
            executor = SingleStage(model, ps=ps, num_microbatches=2)
        else:
            stages = gpt_stages(
                config, llama_spec(), VOCAB, 16, placement=schedules.placement("1f1b", 2), parallel=ps
            )
            executor = Pipeline(stages, ps=ps, num_microbatches=2)
        executor.step(rows, loss_fn)
    return ps.is_last_stage, [str(w.message) for w in caught if "context parallelism" in str(w.message)]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (loss_of_preferences, "counts otherwise than the same sum of another"),
        (loss_of_hardest, "topk of [16] works across rows"),
        (loss_of_tokens, None),
    ],
)
def test_an_executors_loss_that_is_no_sum_over_rows_is_told(ranks, loss_fn, message, pp):
    for is_last, told in ranks(said_by_an_executor, loss_fn, pp, world=2 * pp):
        assert len(told) == (is_last and message is not None), told
        assert all(message in text for text in told)


def said_in_an_evaluation(number):
    ps = state(cp=2)
    tokens = torch.arange(4 * 16).view(4, 16) % VOCAB
    rows = context_batch({"tokens": tokens, "labels": tokens.roll(-1, 1)}, ps)
    model = GPTModel(small(num_layers=1), llama_spec(), VOCAB, 16, parallel=ps).eval()
    with warnings.catch_warnings(record=True, action="always") as caught, torch.no_grad():
        for _ in range(3):
            losses = model(**rows)
            text = f"{getattr(losses, number)():.3f}"
    return text, [str(w.message) for w in caught]


@pytest.mark.parametrize("number, said", [("max", "max of"), ("mean", "mean over"), ("sum", "sum over")])
def test_a_number_of_own_rows_that_is_printed_is_told_in_an_evaluation(ranks, number, said):
    for _, told in ranks(said_in_an_evaluation, number, world=2):
        assert len(told) == 1 and f"{said} rows which are this context rank's is read" in told[0], told


def best(scores):
    return scores.argmax().item()


def passing(scores):
    return (scores > -60).tolist()


def order(scores):
    return scores.sort()[1].tolist()


def chosen(read, summed):
    """What is said of scores of whole sequences, and what was read; of all rows and of one process."""
    ps = state(cp=2)
    tokens = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(3))
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "position_ids": torch.arange(16).expand(4, -1)}
    found = []
    with warnings.catch_warnings(record=True, action="always") as caught, torch.no_grad():
        for parallel in (ps, ParallelState.single("cpu")):
            model = GPTModel(small(num_layers=1), llama_spec(), VOCAB, 16, parallel=parallel, seed=1).double()
            scores = -model(**context_batch(batch, parallel)).sum(1)
            if summed and parallel is ps:
                torch.distributed.all_reduce(scores, group=ps.group("cp").process_group)
            found.append(read(scores))
    return [str(w.message) for w in caught], found


@pytest.mark.parametrize("read", [best, passing, order])
def test_scores_of_own_rows_that_decide_between_sequences_are_told(ranks, read):
    for told, _ in ranks(chosen, read, False, world=2):
        assert len(told) == 1 and "sum over rows which are this context rank's is read" in told[0], told
    for told, (ours, alone) in ranks(chosen, read, True, world=2):
        assert not told and ours == alone
