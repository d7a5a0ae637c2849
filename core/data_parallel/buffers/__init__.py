"""Flat buffers of weights and gradients, cut into buckets that are reduced when they are complete."""
