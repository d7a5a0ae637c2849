"""Tests of the examples, as a user runs them."""
