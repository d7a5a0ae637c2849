"""Keys and values of the tokens so far, so that generation computes each token once.

Letters: b sequences, g query groups, d head size; n new tokens of a forward, t all tokens so far.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class LayerCache:
    """Of one layer: k and v, each [b, g/tp, positions, d], allocated by the first tokens that arrive."""

    def __init__(self, positions: int, padding: Tensor | None) -> None:
        self.positions = positions
        self.padding = padding
        self.length = 0
        self._keys_and_values: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """k, v [b, g/tp, n, d] of new tokens -> k, v [b, g/tp, t, d] of all, and the mask [b, 1, n, t] of padding.

        The mask is None where no sequence is padded: attention is causal then. True = masked out.
        Raises ValueError: more tokens than positions.
        """
        new = k.shape[2]
        start = self.length
        if start + new > self.positions:
            raise ValueError(
                f"a cache of {self.positions} positions holds {start} tokens; {new} more do not fit"
            )
        if self._keys_and_values is None:
            shape = (*k.shape[:2], self.positions)
            keys = k.new_empty(*shape, k.shape[3])
            # of latent attention values have a size of their own
            self._keys_and_values = keys, v.new_empty(*shape, v.shape[3])
        all_keys, all_values = self._keys_and_values
        all_keys[:, :, start : start + new] = k
        all_values[:, :, start : start + new] = v
        self.length = total = start + new
        return all_keys[:, :, :total], all_values[:, :, :total], self._mask(new, total)

    def _mask(self, new: int, total: int) -> Tensor | None:
        if self.padding is None:
            return None
        earlier_or_same = torch.ones(new, total, dtype=torch.bool, device=self.padding.device).tril(
            total - new
        )
        visible = earlier_or_same & ~self.padding[:, None, :total]
        # a padded token sees itself: a row without any key would be NaN, and 0 times NaN is NaN in the next layer
        visible |= torch.ones_like(earlier_or_same).tril(total - new).triu(total - new)
        return ~visible[:, None]


class KVCache:
    """Of all layers of a model or of a pipeline stage, by the layers' global numbers.

    positions: tokens that each sequence can have. padding: bool [b, positions], True where a shorter prompt was
    filled up (on the left, so that all sequences end at the same position); None: no sequence is padded.
    """

    def __init__(self, positions: int, padding: Tensor | None = None) -> None:
        self.positions = positions
        self.padding = padding
        self._layers: dict[int, LayerCache] = {}

    def layer(self, number: int) -> LayerCache:
        """The cache of a layer, by its global number."""
        return self._layers.setdefault(number, LayerCache(self.positions, self.padding))

    @contextmanager
    def used_by(self, model: nn.Module) -> Iterator[None]:
        """Within, every attention of `model` with a `cache_of_layer` extends this one by the tokens it is given."""
        attentions: list[Any] = [
            module for module in model.modules() if hasattr(module, "cache_of_layer")
        ]
        for attention in attentions:
            attention.cache_of_layer = self.layer(attention.layer_number)
        try:
            yield
        finally:
            for attention in attentions:
                attention.cache_of_layer = None
