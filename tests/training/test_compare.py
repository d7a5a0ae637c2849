"""What a run compares itself with at its end."""

from types import SimpleNamespace

import pytest
import torch

from core.training.run.compare import _told_of_dropout, comparisons


def test_a_large_model_is_not_run_again_in_one_process():
    """It would not fit, or take hours: told, and nothing is built."""
    for parameters, rows in ((8_030_261_248, 1), (100_000_000, 1024)):
        training = SimpleNamespace(
            rows_per_sample=1, global_batch_size=rows, compare_with=None, compare_first_step=None
        )
        run = SimpleNamespace(training=training, data=SimpleNamespace(sequence_length=2048))
        (line,) = comparisons(None, 0, [], run, None, parameters, torch.device("cpu"))
        assert line.startswith(f"first step not compared with one process: {parameters:,} parameters")


def test_a_run_on_an_accelerator_is_not_run_again_on_a_cpu_unless_somebody_asks():
    for asked, device in ((None, "cuda"), (False, "cpu"), (False, "cuda")):
        training = SimpleNamespace(
            rows_per_sample=1, global_batch_size=1, compare_with=None, compare_first_step=asked
        )
        run = SimpleNamespace(training=training, data=SimpleNamespace(sequence_length=8))
        assert not list(comparisons(None, 0, [], run, None, 1000, torch.device(device)))


@pytest.mark.parametrize(
    "dropout, lora, ranks, told",
    [(0.1, 0.0, 2, True), (0.0, 0.1, 2, True), (0.1, 0.1, 1, False), (0.0, 0.0, 4, False)],
)
def test_a_difference_that_dropout_makes_is_explained(dropout, lora, ranks, told):
    model = SimpleNamespace(config=SimpleNamespace(hidden_dropout=dropout, attention_dropout=0.0))
    run = SimpleNamespace(
        parallel=SimpleNamespace(tensor=ranks, context=1), lora=SimpleNamespace(rank=8, dropout=lora)
    )
    assert ("other masks" in _told_of_dropout(model, run)) == told
