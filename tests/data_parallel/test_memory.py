"""The formulas of bytes per parameter: those of the ZeRO paper and of the byte table in the docs."""

import pytest

from core.data_parallel.memory import StateBytes, expected_bytes

N = 64 * 9 * 40  # divides over the ranks below


def per_parameter(**facts):
    return expected_bytes(N, **facts).device / N


@pytest.mark.parametrize("d", [1, 2, 3, 8])
def test_the_table(d):
    fp32 = [per_parameter(zero_stage=stage, ranks=d) for stage in range(4)]
    assert fp32 == pytest.approx([16, 8 + 8 / d, 4 + 12 / d, 16 / d])
    bf16 = [per_parameter(zero_stage=stage, ranks=d, param_bytes=2) for stage in range(4)]
    assert bf16 == pytest.approx([18, 6 + 12 / d, 2 + 16 / d, 18 / d])
    narrow = [per_parameter(zero_stage=stage, ranks=d, param_bytes=2, grad_bytes=2) for stage in range(4)]
    assert narrow == pytest.approx([16, 4 + 12 / d, 2 + 14 / d, 16 / d])
    pure = {"param_bytes": 2, "grad_bytes": 2, "main_params": False}
    assert per_parameter(zero_stage=3, ranks=d, **pure) == pytest.approx(12 / d), "float32 moments"
    assert per_parameter(zero_stage=1, ranks=d, moments=1) == pytest.approx(8 + 4 / d), "SGD"
    assert per_parameter(zero_stage=0, ranks=d, param_bytes=8) == 32


@pytest.mark.parametrize("stage, d", [(0, 1), (1, 4), (3, 4)])
def test_an_offload_moves_copies_and_moments_to_the_host(stage, d):
    facts = {"zero_stage": stage, "ranks": d, "param_bytes": 2}
    whole, half, none = (expected_bytes(N, **facts, offload_fraction=f) for f in (1.0, 0.5, 0.0))
    divided = d if stage else 1
    assert none.host == 0 and whole.host == none.optimizer == 12 * N / divided and whole.optimizer == 0
    assert half.host + half.optimizer == whole.host and abs(half.host - half.optimizer) <= 2 * 64 * 12
    assert whole.weights == none.weights and whole.gradients == none.gradients


def test_parts_add_up():
    assert StateBytes(1, 2, 3, 4) + StateBytes(1, 1, 1, 1) == StateBytes(2, 3, 4, 5)


@pytest.mark.parametrize("wrong", [{"zero_stage": 4}, {"ranks": 0}, {"offload_fraction": 1.5}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="use a stage of 0 to 3, at least 1 rank, and a fraction from 0 to 1"):
        expected_bytes(N, **{"zero_stage": 1} | wrong)
