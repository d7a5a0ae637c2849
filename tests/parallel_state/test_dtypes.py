"""A dtype that a device does not compute in is refused by name, before there is a weight; devices are stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from core.models.gpt import GPTModel, llama_config, llama_spec
from core.parallel_state import ParallelState
from core.parallel_state.environment import check_dtype


def tells(answer):
    """A device module as CUDA's, whose devices before Ampere emulate bfloat16."""

    def is_bf16_supported(including_emulation=True):
        return answer or including_emulation

    return SimpleNamespace(is_bf16_supported=is_bf16_supported)


def test_emulated_bfloat16_is_refused(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda of: tells(False))
    with pytest.raises(ValueError, match=r"bfloat16 on cuda:0: this device does not .*model\.fp16"):
        check_dtype(device, torch.bfloat16)
    check_dtype(device, torch.float16)
    check_dtype(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(
    "module",
    [tells(True), SimpleNamespace(is_bf16_supported=lambda: True), SimpleNamespace()],
    ids=["native", "without emulation", "silent"],
)
def test_native_bfloat16_and_backends_that_do_not_tell_pass(monkeypatch, module):
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    check_dtype(torch.device("xpu", 0), torch.bfloat16)


def test_a_model_of_eight_bits_is_refused():
    config = llama_config(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8, params_dtype=torch.float8_e4m3fn
    )
    with pytest.raises(ValueError, match=r"weights of torch\.float8_e4m3fn: 8-bit products are not here"):
        GPTModel(config, llama_spec(), 16, 4, parallel=ParallelState.single("cpu"))
