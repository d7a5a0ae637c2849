"""Tests of core/training."""
