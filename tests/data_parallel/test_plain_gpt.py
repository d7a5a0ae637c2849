"""Torch's plain loop around a wrapped GPT: operations add gradients themselves, before autograd calls its hooks."""

import pytest
import torch

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import ParallelState
from tests.parity.whole import whole_parameters
from tests.states import state

VOCAB, S, ROWS = 24, 8, 4
CONFIG = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}


def by_optimizer(model, optimizer):
    optimizer.zero_grad()


def by_model(model, optimizer):
    model.zero_grad()


def by_hand(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


def trained(ps, clear, zero_stage, how):
    """Parameters after three steps, each after a backward that is given up (a batch skipped for its loss)."""
    torch.manual_seed(3)
    model = GPTModel(llama_config(**CONFIG), llama_spec(), VOCAB, S, seed=1, parallel=ps, **how)
    if zero_stage is not None:
        shard = DataParallel(model, ps, zero_stage=zero_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    share = ROWS // ps.size("dp")
    for step in range(3):
        tokens = torch.randint(VOCAB, (ROWS, S + 1), generator=torch.Generator().manual_seed(step))
        tokens = tokens[ps.index("dp") * share :][:share]
        for attempt in range(2):
            clear(model, optimizer)
            (model(tokens[:, :-1], labels=tokens[:, 1:]).mean() * (attempt or 7)).backward()
        optimizer.step()
    parameters = whole_parameters(model, ps)
    if zero_stage is not None:
        shard.remove()
    return parameters


def cleared_alike(zero_stage, how):
    ps = state()
    expected = trained(ParallelState.single("cpu"), by_optimizer, None, how)
    for clear in (by_optimizer, by_model, by_hand):
        found = trained(ps, clear, zero_stage, how)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


FULL = pytest.mark.full
TIED, CHUNKS = {"share_embeddings_and_output_weights": True}, {"loss_chunk": 4}


@pytest.mark.parametrize("how", [{}, TIED, pytest.param(CHUNKS, marks=FULL)], ids=["untied", "tied", "chunks"])
@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_set_to_none_are_gone_and_no_others(ranks, world, zero_stage, how):
    ranks(cleared_alike, zero_stage, how, world=world)
