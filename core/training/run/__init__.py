"""A training run: what it is built of, its loop, evaluation, checkpoints and data."""
