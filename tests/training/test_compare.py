"""What a run compares itself with at its end."""

from types import SimpleNamespace

from core.training.run.compare import comparisons


def test_a_large_model_is_not_run_again_in_one_process():
    """It would not fit, or take hours: told, and nothing is built."""
    for parameters, rows in ((8_030_261_248, 1), (100_000_000, 1024)):
        training = SimpleNamespace(global_batch_size=rows, compare_with=None)
        run = SimpleNamespace(training=training, data=SimpleNamespace(sequence_length=2048))
        (line,) = comparisons(None, 0, [], run, None, parameters)
        assert line.startswith(f"first step not compared with one process: {parameters:,} parameters")
