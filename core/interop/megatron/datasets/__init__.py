"""Megatron's data sets: indexed files, samples of fixed length in its order, blends."""
