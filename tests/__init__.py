"""The tests mirror `core/`; `tests/pool.py` is the one place that starts processes."""
