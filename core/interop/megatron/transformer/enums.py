"""Kinds that Megatron's specs name."""

from enum import Enum


class ModelType(Enum):
    """All are one here."""

    encoder_or_decoder = 1


class LayerType(Enum):
    """Of a transformer layer."""

    encoder = 1
    decoder = 2


class AttnType(Enum):
    """Who is attended to."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """Which positions attention may see."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
