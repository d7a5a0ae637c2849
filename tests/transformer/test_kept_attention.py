"""A recomputed layer that keeps attention's output runs no attention kernel twice, and changes no bit."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.autograd import apply_recompute
from core.models.gpt import GPTModel, llama_spec
from core.parallel_state import ParallelState
from core.transformer import TransformerConfig

S, LAYERS = 48, 3


class Kernels(TorchDispatchMode):
    """Counts attention kernels: forward, backward."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.name():
            if "backward" in func.name():
                self.backward += 1
            else:
                self.forward += 1
        return func(*args, **(kwargs or {}))


def step(policy, keeps, windows=None, documents=False):
    """(gradients, kernels of the second step)."""
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=4, num_query_groups=2, hidden_dropout=0.1,
        attention_dropout=0.0, windows=windows,
    )  # fmt: skip
    model = GPTModel(config, llama_spec(), 53, S, parallel=ParallelState.single("cpu"), seed=1)
    apply_recompute(model, policy, stage=model.stage, keeps=keeps)
    tokens = torch.randint(53, (2, S), generator=torch.Generator().manual_seed(0))
    begin = {"document_begin": torch.arange(S).expand(2, S) // 16 * 16} if documents else {}
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        with Kernels() as kernels:
            model(tokens, labels=tokens.roll(-1, 1), **begin).sum().backward()
    return [p.grad for p in model.parameters()], (kernels.forward, kernels.backward)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("windows", [None, (5, None, 5)])
def test_kernels_run_as_often_as_without_recomputation_and_no_bit_changes(windows, documents):
    plain, (forward, backward) = step("none", "attention", windows, documents)
    kept, kernels = step("layer", "attention", windows, documents)
    # torch tells autograd's kernels apart; the counts without regions are those of one run
    assert kernels[0] == forward == backward == kernels[1] == LAYERS
    for a, b in zip(kept, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if windows is None:
        assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_keeping_nothing_runs_them_twice():
    assert step("layer", "nothing")[1] == (2 * LAYERS, LAYERS)
    assert step("selective", "attention")[1] == (2 * LAYERS, LAYERS)
