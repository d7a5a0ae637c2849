"""The benchmark's bound of a pipelined step: which kernels are bare, and what their schedule comes to."""

import pytest
import torch

from benchmarks.llama import Shape
from benchmarks.pipeline_bound import MICROBATCHES, BareStep, critical_path, gpt_step, kernels_of_actions
from core.parallel_state import ParallelState
from core.pipeline.schedule import schedules
from tests.flops import matmul_flops

TINY = Shape(hidden=32, layers=2, heads=8, kv_heads=4, ffn=48, seq=16, vocab=64)


def flops(run):
    with matmul_flops() as counter:
        run()
    return counter.get_total_flops()


def test_bare_kernels_have_the_flops_of_the_step():
    step, pipeline = gpt_step(ParallelState.single("cpu"), TINY, 2, torch.float32)
    step()
    with kernels_of_actions(pipeline.stages, microbatch=1) as kernels:
        step()
    assert set(kernels) == {("F", 0), ("I", 0), ("W", 0)}
    linears = 4 * TINY.layers + 1
    assert len([call for call in kernels["W", 0].calls if "mm" in call[0].name()]) == linears
    bare = BareStep(pipeline.schedule, 0, kernels, 1)
    assert flops(bare) == flops(step) > 0
    assert [len(each) for each in bare.seconds.values()] == 3 * [MICROBATCHES]


@pytest.mark.parametrize(("message", "expected"), [(0.0, 26.0), (0.5, 27.0)])
def test_the_critical_path_has_the_bubble_and_the_messages(message, expected):
    """Stage 1 is busy for 8 x 3 after a first F and message; then a message and the last I and W of stage 0."""
    schedule = schedules.make("1f1b", 2, 8)
    seconds = {(kind, stage): [1.0, 1.0, 9.0] for kind in "FIW" for stage in (0, 1)}
    assert critical_path(schedule, seconds, message) == expected
