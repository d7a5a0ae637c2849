"""Context ranks that draw their batches from seeds of their own are told: each would hold rows of other sequences."""

import warnings

import pytest
import torch
import torch.distributed as dist

from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import context_batch
from core.pipeline import SingleStage
from tests.states import state

S, VOCAB = 8, 40


def heard(seed_of_rank, is_driven, moved):
    """Messages of three steps."""
    ps = state(cp=2)
    config = llama_config(num_layers=1, hidden_size=16, num_attention_heads=2, params_dtype=torch.float64)
    model = GPTModel(config, llama_spec(), VOCAB, S, parallel=ps, seed=1)
    generator = torch.Generator().manual_seed(seed_of_rank * dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            tokens = torch.randint(VOCAB, (2, S + 1), generator=generator)
            batch = context_batch({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}, ps)
            if moved == "copied":
                # as `.to(device)` copies
                batch = {name: x.to(torch.int32).to(torch.int64) for name, x in batch.items()}
            elif moved == "unknown" and dist.get_rank() == 1:
                batch = {name: torch.from_numpy(x.numpy().copy()) for name, x in batch.items()}
            if is_driven:
                executor = SingleStage(model, ps=ps, num_microbatches=2)
                executor.step(batch, lambda losses, microbatch: (losses.sum(), losses.numel()))
            else:
                model(**batch).mean().backward()
    return [str(w.message) for w in caught if "context" in str(w.message)]


@pytest.mark.parametrize("moved", ["", "copied"])
@pytest.mark.parametrize("is_driven", [False, True])
def test_other_sequences_are_told(ranks, is_driven, moved):
    for messages in ranks(heard, 1, is_driven, moved, world=2):
        assert len(messages) == 1, messages
        assert "cut their rows out of other sequences" in messages[0] and "get_data_parallel_rank" in messages[0]


@pytest.mark.parametrize("is_driven", [False, True])
def test_the_same_sequences_are_not(ranks, is_driven):
    assert ranks(heard, 0, is_driven, "", world=2) == [[], []]


def test_a_rank_whose_rows_are_copies_knows_no_sequences(ranks):
    first, second = ranks(heard, 0, False, "unknown", world=2)
    assert first == [] and len(second) == 1
    assert "numpy of a batch's rows" in second[0]
