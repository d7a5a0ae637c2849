"""Tests of `core/datasets`: files, order and batches; no test here starts a process group."""
