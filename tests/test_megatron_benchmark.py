"""The peer Megatron-Core is optional, and what stands in for CUDA is there for its code only."""

import importlib.util
import sys

import pytest
import torch

from benchmarks import megatron
from benchmarks.megatron_peer import FACTORIES, cpu_in_place_of_cuda


def test_where_megatron_core_is_missing_the_command_for_it_is_told(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["megatron", "--quick"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install --no-deps megatron-core==0\.16\.1"):
        megatron.main()


def test_the_cpu_stands_in_for_cuda_inside_only():
    before = [getattr(torch, name) for name in FACTORIES] + [torch.cuda.current_device, torch.Tensor.cuda]
    with cpu_in_place_of_cuda():
        assert torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
        assert torch.ones(2).cuda().sum() == 2
        assert torch.cuda.current_device() == torch.device("cpu")
    assert [getattr(torch, name) for name in FACTORIES] + [torch.cuda.current_device, torch.Tensor.cuda] == before
