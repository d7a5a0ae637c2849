"""Gradients over many replicas."""
