"""Deferred weight gradients and recomputation, against plain modules."""
