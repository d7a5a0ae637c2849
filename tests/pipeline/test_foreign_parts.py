"""What users forget: to hand over the owner of main_grad, and that their own parts draw random numbers."""

import dataclasses

import pytest
import torch
from torch import nn

from core.models.gpt import gpt2_spec
from core.pipeline import SingleStage
from core.training import next_token_loss
from tests.models.gpt import batch, gpt
from tests.parity.whole import whole_gradients
from tests.states import state
from tests.twins.per_parameter import PerParameterGradSync


class Dropping(nn.Module):
    """Somebody's own MLP with torch's own dropout."""

    def __init__(self, build):
        super().__init__()
        self.layer, self.drop = nn.Linear(32, 32, dtype=torch.float64), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(torch.tanh(self.layer(x)))


def one_step():
    ps, (tokens, labels) = state(tp=2), batch()
    torch.manual_seed(ps.rank)  # ranks that seed differently
    before = torch.get_rng_state()
    model = gpt(parallel=ps, spec=dataclasses.replace(gpt2_spec(), mlp=Dropping), seed=1)
    sync = PerParameterGradSync(model, ps)
    result = SingleStage(model, ps=ps, grad_sync=sync).step({"tokens": tokens, "labels": labels}, next_token_loss)
    assert torch.equal(before, torch.get_rng_state())
    whole_gradients(model, ps)  # asserts that replicas agree bit for bit
    return result.loss.item()


def test_parts_that_draw_draw_alike_on_tensor_ranks(ranks):
    first, second = ranks(one_step)
    assert first == second


def test_a_main_grad_without_its_owner_is_refused(single):
    model = gpt(parallel=single)
    sync = PerParameterGradSync(model, single)
    with pytest.raises(ValueError, match="parameters have a main_grad but grad_sync is None"):
        SingleStage(model, ps=single)
    sync.remove()
    SingleStage(model, ps=single)


def test_a_later_stage_refuses_tokens(single):
    later = gpt(parallel=single, pre_process=False)
    with pytest.raises(ValueError, match=r"previous stage's output, \[s, b, h\] of torch.float64, got \(2, 8\)"):
        later(batch()[0])
