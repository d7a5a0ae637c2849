"""Tests of core/tensor_parallel."""
