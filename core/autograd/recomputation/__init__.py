"""Activation checkpointing: regions that run again in backward, and what they find then as the first run did."""
