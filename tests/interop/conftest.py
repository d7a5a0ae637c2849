"""Megatron's world of one process, new for each test."""

import pytest

from core.interop.megatron import mpu


@pytest.fixture
def state():
    mpu.destroy_model_parallel()
    yield mpu.initialize_model_parallel(1, 1)
    mpu.destroy_model_parallel()
