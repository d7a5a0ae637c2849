"""A batch of packed documents of which a loop gives the model the tokens alone is told."""

import warnings

import pytest
import torch

from core.datasets.packing import Packing
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import ParallelState, context_batch
from core.training.run.loader import Loader, moved_to
from tests.states import state

S, VOCAB, END = 8, 40, 39


def heard(call, documents=True):
    ps = ParallelState.single("cpu")
    config = llama_config(num_layers=1, hidden_size=16, num_attention_heads=2, params_dtype=torch.float64)
    model = GPTModel(config, llama_spec(), VOCAB, S, parallel=ps, seed=1)
    tokens = torch.arange(2 * S).view(2, S) + 1
    if documents:
        tokens[0, 3] = END
    packing = Packing(end_of_text=END, reset_position_ids=True, reset_attention_mask=True)
    batch = moved_to(ps.device)(context_batch(packing.batch(tokens, tokens.roll(-1, 1)), ps))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call(model, batch)
    return [str(w.message) for w in caught]


def test_tokens_alone_are_told_once():
    (told,) = heard(lambda model, batch: model(batch["tokens"], labels=batch["labels"]))
    assert "document_begin" in told and "model(**batch)" in told


def test_logits_of_tokens_alone_are_told():
    assert len(heard(lambda model, batch: model(batch["tokens"]))) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: model(**batch),
        lambda model, batch: model(batch["tokens"], document_begin=batch["document_begin"]),
        lambda model, batch: model(batch["tokens"], attention_mask=torch.ones(1, 1, S, S).triu(1).bool()),
    ],
)
def test_a_mask_is_not(call):
    assert heard(call) == []


def test_rows_of_one_document_are_not():
    assert heard(lambda model, batch: model(batch["tokens"]), documents=False) == []


class Batches:
    def batch(self, step, rank=0, size=1):
        packing = Packing(end_of_text=END, reset_attention_mask=True)
        tokens = torch.full((2, S), END)
        return packing.batch(tokens, tokens.clone())


def test_microbatches_remember():
    loader = Loader(Batches(), ParallelState.single("cpu"), train_steps=1, microbatches=2)
    assert [microbatch["tokens"].of_documents for microbatch in loader.microbatches()] == [True, True]


def of_documents():
    return context_batch(Batches().batch(0), state(cp=2))["tokens"].of_documents


def test_rows_of_a_context_rank_remember(ranks):
    assert ranks(of_documents, world=2) == [True, True]


def test_a_batch_of_other_names_passes():
    moved = moved_to(torch.device("cpu"))({"mine": torch.ones(1, 2), "document_begin": torch.ones(1, 2)})
    assert set(moved) == {"mine", "document_begin"}
