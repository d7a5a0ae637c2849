"""Tests of core/parallel_state."""
