"""float64 everywhere: split and whole may differ by rounding only."""

import pytest
import torch


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
