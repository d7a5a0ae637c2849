"""What one step over context ranks costs in calls and in bytes, which no noise can blur."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness import count_calls
from benchmarks.tensor_parallel import counted_step
from core.autograd import apply_recompute
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import context_batch
from core.testing.live import LiveBytes
from tests.models.test_call_counts import without_hooks_of_others
from tests.states import state

KINDS = ["all_gather", "p2p", "a2a"]
VOCAB = 256


def model_and_rows(s, kind, loss_chunk=None):
    """4 layers over all ranks as context ranks, and this rank's rows of one sequence."""
    ps = state(cp=dist.get_world_size(), cp_comm_type=kind)
    facts = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 192}
    config = llama_config(**facts, params_dtype=torch.float32)
    model = GPTModel(config, llama_spec(), VOCAB, s, parallel=ps, seed=1, loss_chunk=loss_chunk)
    tokens = torch.randint(VOCAB, (1, s), generator=torch.Generator().manual_seed(0))
    return model, context_batch({"tokens": tokens, "labels": tokens.roll(-1, 1)}, ps)


def python_calls(kind):
    """Of one forward, backward and AdamW step on this rank."""
    model, rows = model_and_rows(32, kind)
    for _ in range(17):  # in which it is seen what a program does with the losses
        _mean_loss(model, rows).backward()
    return without_hooks_of_others(count_calls, counted_step(model, partial(_mean_loss, model, rows)))


def _mean_loss(model, rows):
    return model(**rows).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_python_calls_of_a_step(ranks, kind):
    """`python_calls_cp`: 4 layers over 2 context ranks."""
    for calls in ranks(python_calls, kind, world=2):
        assert 300 < calls <= 1600, "below 300 the count itself is broken"


def peak(kind, recompute, loss_chunk, s=512):
    """Most bytes of tensors alive at once in forward and backward, beside weights and their gradients."""
    model, rows = model_and_rows(s, kind, loss_chunk)
    apply_recompute(model, recompute, stage=model.stage)
    for _ in range(2):  # which make gradients, and compare what the ranks hold
        model(**rows).sum().backward()
    there = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), *rows.values()]

    def one_step():
        with LiveBytes(*there) as live:
            model(**rows).sum().backward()
        return live.peak

    # the thread that carried a message holds its buffers for a moment after the wait: not in every step
    return min(one_step() for _ in range(3))


@pytest.mark.parametrize(
    "kind, recompute, loss_chunk",
    [*((kind, "none", None) for kind in KINDS), ("p2p", "layer", 32), ("a2a", "layer", 32)],
)
def test_four_context_ranks_hold_a_quarter_each(ranks, kind, recompute, loss_chunk):
    """`activation_fraction_cp4`. Gathered keys are those of one layer, however many there are."""
    (alone,) = ranks(peak, kind, recompute, loss_chunk, world=1)
    assert max(ranks(peak, kind, recompute, loss_chunk, world=4)) <= 0.30 * alone
