"""Torch's checkpoint around our layers: every forward finds its own dropout masks, also two before one backward."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.models.gpt import batch, gpt


def gradients(reentrant, checkpointed):
    torch.manual_seed(3)
    model = gpt("gpt2", facts={"dropout": 0.3})
    if checkpointed:
        for layer in model.decoder.layers.values():
            plain = layer.forward
            layer.forward = lambda *args, plain=plain, **kwargs: checkpoint(
                lambda *args: plain(*args, **kwargs), *args, use_reentrant=reentrant
            )
    (tokens, labels), other = batch(), batch()[0].flip(0)
    torch.manual_seed(11)
    chosen, refused = model(tokens, labels=labels).mean(), model(other, labels=labels).square().mean()
    (chosen - refused).backward()
    state = torch.get_rng_state()
    return {name: p.grad for name, p in model.named_parameters()}, state


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_one_backward(reentrant):
    (want, state), (found, after) = (gradients(reentrant, checkpointed) for checkpointed in (False, True))
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert torch.equal(state, after), "the user's generator is where it would be"
