"""Kinds that Megatron's specs name."""

from enum import Enum


class ModelType(Enum):
    """One kind serves every model here."""

    encoder_or_decoder = 1


class LayerType(Enum):
    """Whether a transformer layer is an encoder's or a decoder's."""

    encoder = 1
    decoder = 2


class AttnType(Enum):
    """Whether queries attend to their own or to another sequence."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """Which positions attention may see."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
