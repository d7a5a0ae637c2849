"""Tests of core/transformer."""
