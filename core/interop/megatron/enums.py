"""Kinds of models that Megatron's scripts name."""

from enum import Enum


class ModelType(Enum):
    """All are one here: what a stage is, its module says."""

    encoder_or_decoder = 1
    retro_encoder = 2
    retro_decoder = 3
