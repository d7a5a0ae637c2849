"""Positions of tokens: learned embeddings to add, or rotary tables for the attention."""

from collections.abc import Callable
from math import ceil, floor, log, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.parallel_state import Init, Layout
from core.parallel_state.spread import SpreadModule
from core.tensor_parallel import sum_gradient
from core.tensor_parallel.mappings import sequence_shard
from core.transformer.attention.qkv import LayerTables, Tables
from core.transformer.spec import Build
from core.transformer.transformer_config import RotaryConfig, RotaryScaling


class LearnedPositions(SpreadModule):
    """weight [max_sequence_length, h], in full on every rank; partial over tp under sequence parallelism."""

    def __init__(self, build: Build, max_sequence_length: int) -> None:
        super().__init__()
        self.place = place = build.place
        layout = Layout(
            (max_sequence_length, build.config.hidden_size), partial=place.sequence_partial
        )
        self.weight = place.parameter(layout, Init(std=build.config.init_method_std))
        self.group = place.group if place.splits_sequence else None

    def forward(self, s: int, position_ids: Tensor | None) -> Tensor:
        """position_ids [b, s] (None: 0 .. s-1) -> [s, b or 1, h], this rank's rows under sequence parallelism."""
        weight = self.weight
        if position_ids is None:
            ids = torch.arange(s, device=weight.device)[:, None]
        else:
            ids = position_ids.t()
        if self.group is None:
            return F.embedding(ids, weight)
        return F.embedding(sequence_shard(ids, self.group), sum_gradient(weight, self.group))


def scaled_frequencies(
    frequencies: Tensor, scaling: RotaryScaling | None, base: float = 10000.0
) -> Tensor:
    """Radians per token of each pair of dims, as the model was trained to see them; see `RotaryScaling`.

    frequencies: base^(-2i/d), [d/2].
    """
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    if scaling.kind == "yarn":
        kept_share = _kept_by_yarn(len(frequencies), scaling, base).to(frequencies)
        return kept_share * frequencies + (1 - kept_share) * slowed
    assert scaling.kind == "llama3", scaling.kind
    # 1 where a wavelength fits often into the original length (unchanged), 0 where it hardly does (slowed down)
    wavelengths_in_original = scaling.original_max_position_embeddings * frequencies / (2 * pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    unchanged_share = ((wavelengths_in_original - low) / (high - low)).clamp(0, 1)
    return unchanged_share * frequencies + (1 - unchanged_share) * slowed


def _kept_by_yarn(pairs: int, scaling: RotaryScaling, base: float) -> Tensor:
    """1 for each pair of dims that keeps its frequency, 0 for one that is slowed down (YaRN, arXiv 2309.00071)."""

    def pair_that_turns(times: float) -> float:
        """The pair, with a fraction, that turns so often in the original length."""
        return pairs * log(scaling.original_max_position_embeddings / (2 * pi * times)) / log(base)

    # whole pairs, as DeepSeek's code and transformers' have it
    first = max(floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(ceil(pair_that_turns(scaling.beta_slow)), 2 * pairs - 1)
    # a ramp of no length would divide by 0
    length = max(last - first, 0.001)
    numbers = torch.arange(pairs, dtype=torch.float64, device="cpu")
    return 1 - ((numbers - first) / length).clamp(0, 1)


class Rotary(nn.Module):
    """Tables of rotary position embedding (RoFormer, arXiv 2104.09864), halves convention (GPT-NeoX, Llama).

    rotary: default the configuration's own, of all layers.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, build: Build, max_sequence_length: int, rotary: RotaryConfig | None = None
    ) -> None:
        super().__init__()
        config = build.config
        if rotary is None:
            rotary = config.rotary
        width = int(config.rotary_size * rotary.percent)
        if width % 2 or width == 0:
            raise ValueError(
                f"rotary needs an even number of dims per head, got {width} of kv_channels={config.head_size}; "
                "change kv_channels, num_attention_heads or rotary_percent"
            )
        self.width = width
        self.base = rotary.base
        self.positions = max_sequence_length
        self.scaling = rotary.scaling
        self.device = build.parallel.device
        for name, table in self._tables(build.place.device, config.params_dtype).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """cos and sin [positions, d/2], computed in float64."""
        # in float64: in float32 the angle of a position beyond 100,000 would be off by thousandths
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / self.width
        positions_column = torch.arange(self.positions, dtype=torch.float64, device="cpu")
        frequencies = scaled_frequencies(self.base**-exponents, self.scaling, self.base)
        angle = torch.outer(positions_column, frequencies)
        factor = 1.0 if self.scaling is None else self.scaling.table_factor
        tables = {"cos": angle.cos() * factor, "sin": angle.sin() * factor}
        return {name: table.to(device, dtype) for name, table in tables.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """No checkpoint holds the tables: they are computed where the module moves, also from meta (`to_empty`)."""
        super()._apply(fn, recurse)
        self._rebuild(self.cos.device)
        return self

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *remaining: Any
    ) -> None:
        """A model on meta that is loaded with `assign=True` is then where its weights are."""
        super()._load_from_state_dict(state, prefix, metadata, *remaining)
        if self.cos.is_meta and metadata.get("assign_to_params_buffers"):
            self._rebuild(self.device)

    def reset_parameters(self) -> None:
        """Compute the tables again, on the model's device: for a model on meta that is filled part by part."""
        self._rebuild(self.device)

    def _rebuild(self, device: torch.device) -> None:
        for name, table in self._tables(device, self.cos.dtype).items():
            setattr(self, name, table)

    def forward(self, s: int, position_ids: Tensor | None) -> Tables:
        """(cos, sin), each [b or 1, 1, s, d/2]: ready to multiply [b, heads, s, d/2]."""
        if position_ids is None:
            return self.cos[None, None, :s], self.sin[None, None, :s]
        return self.cos[position_ids][:, None], self.sin[position_ids][:, None]


class RotaryPerLayer(nn.Module):
    """The tables of each layer, where layers differ (`TransformerConfig.rotary_per_layer`); equal ones are one."""

    def __init__(self, build: Build, max_sequence_length: int) -> None:
        super().__init__()
        per_layer = build.config.rotary_per_layer or ()
        different = list(dict.fromkeys(rotary for rotary in per_layer if rotary is not None))
        # no ModuleList: activation checkpointing takes the elements of one for layers
        for number, rotary in enumerate(different):
            self.add_module(f"tables_{number}", Rotary(build, max_sequence_length, rotary))
        self._names = [
            None if rotary is None else f"tables_{different.index(rotary)}" for rotary in per_layer
        ]

    def forward(self, s: int, position_ids: Tensor | None) -> LayerTables:
        """By the layers' global numbers: what `Rotary` gives, None where a layer does not rotate."""
        # each different table is cut once, not once per layer
        tables = {name: child(s, position_ids) for name, child in self.named_children()}
        return [None if name is None else tables[name] for name in self._names]


def build_rotary(build: Build, max_sequence_length: int) -> nn.Module:
    """The rotary positions that the configuration names, one for all layers or for each."""
    rotary_class = Rotary if build.config.rotary_per_layer is None else RotaryPerLayer
    return rotary_class(build, max_sequence_length)
