"""Multi-head latent attention: keys and values of all heads are made of one small vector per token.

DeepSeek-V2 (arXiv 2405.04434, section 2.1), DeepSeek-V3 (arXiv 2412.19437, section 2.1.1). Letters: s sequence, b
microbatch, h hidden, a heads, n the part of a query and key head that does not rotate, r the part that does, v a
value head, c the latent of queries or of keys and values.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from core.context_parallel import Documents
from core.parallel_state import Init
from core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_region,
    gather_from_sequence_region,
    sum_gradients_of_foreign,
)
from core.tensor_parallel.linear import ReplicatedLinear
from core.transformer.attention.kv_cache import LayerCache
from core.transformer.attention.qkv import Tables, rotate
from core.transformer.spec import Build, TransformerLayerSpec


class MultiLatentAttention(nn.Module):
    """x [s, b, h] -> [s, b, h] ([s/tp, b, h] each way under sequence parallelism).

    Down to the latents, whole on every rank: linear_q_down_proj.weight [c, h], linear_kv_down_proj.weight [c + r, h],
    whose last r dims are the rotating part of every head's key. Up to this rank's heads: linear_q_up_proj.weight
    [a/tp, n + r, c], linear_kv_up_proj.weight [a/tp, n + v, c] (key, then value). linear_proj.weight [h, a v/tp].
    Without `q_lora_rank` linear_q_proj.weight [a/tp, n + r, h] takes the place of the first and third. With
    `qk_layernorm` latents are normalised on their way up.

    Under sequence parallelism the latents and the rotating part of keys are gathered, not x. The cache holds expanded
    heads: k [b, a/tp, t, n + r], v [b, a/tp, t, v].
    """

    knows_context = True
    cache_of_layer: LayerCache | None  # while tokens are generated: see `KVCache.used_by`

    def __init__(self, build: Build, spec: TransformerLayerSpec) -> None:
        super().__init__()
        config = build.config
        place = build.place
        rotated = config.rotary_size
        self.not_rotated = config.head_size - rotated
        self.head_size = config.head_size
        self.value_size = config.value_size
        heads = config.num_attention_heads
        assert config.kv_lora_rank is not None
        self.kv_rank = config.kv_lora_rank
        init = Init(std=config.init_method_std)
        down = partial(ReplicatedLinear, config.hidden_size, place=place, init=init)
        up = partial(ColumnParallelLinear, place=place, bias=False, init=init)
        self.linear_q_proj: ColumnParallelLinear | None = None
        self.q_layernorm: nn.Module | None = None
        if config.q_lora_rank is None:
            self.linear_q_proj = up(config.hidden_size, (heads, self.head_size))
        else:
            self.linear_q_down_proj = down(config.q_lora_rank)
            self.q_layernorm = _latent_norm(build, spec, config.q_lora_rank)
            self.linear_q_up_proj = up(config.q_lora_rank, (heads, self.head_size))
        self.linear_kv_down_proj = down(self.kv_rank + rotated)
        self.kv_layernorm = _latent_norm(build, spec, self.kv_rank)
        self.linear_kv_up_proj = up(self.kv_rank, (heads, self.not_rotated + self.value_size))
        self.linear_proj = RowParallelLinear(
            heads * self.value_size,
            config.hidden_size,
            place=place,
            bias=config.add_bias_linear,
            init=Init(std=config.output_std),
        )
        self.core_attention = spec.core_attention(build)
        # whatever it is, it sees this rank's heads only
        sum_gradients_of_foreign(self.core_attention, place.group)
        self.interleaved = config.rotary_interleaved
        self.group = place.group
        self.splits_sequence = place.splits_sequence
        self.layer_number = build.layer
        self.cache_of_layer = None

    def forward(
        self,
        x: Tensor,
        attention_mask: "Tensor | Documents | None" = None,
        rotary: Tables | None = None,
    ) -> Tensor:
        """See the class; `rotary` is (cos, sin), each [b or 1, 1, s, r/2]."""
        q = self._queries(x, rotary)
        k, v = self._keys_and_values(x, rotary)
        if self.cache_of_layer is not None:
            k, v, padding = self.cache_of_layer.extend(k, v)
            if padding is not None:
                attention_mask = padding
        heads = self.core_attention(q, k, v, attention_mask)
        # [s, b, a v]
        return self.linear_proj(heads.permute(2, 0, 1, 3).flatten(2))

    def _queries(self, x: Tensor, rotary: Tables | None) -> Tensor:
        """[b, a/tp, s, n + r]."""
        if self.linear_q_proj is not None:
            y = self.linear_q_proj(x)
        else:
            latent = self.linear_q_down_proj(x)
            if self.q_layernorm is not None:
                latent = self.q_layernorm(latent)
            y = self.linear_q_up_proj(latent)
        q = _heads(y, self.head_size)
        if rotary is None:
            return q
        still, turning = q.split((self.not_rotated, self.head_size - self.not_rotated), -1)
        return torch.cat((still, self._rotate(turning, rotary)), -1)

    def _keys_and_values(self, x: Tensor, rotary: Tables | None) -> tuple[Tensor, Tensor]:
        """k [b, a/tp, s, n + r] and v [b, a/tp, s, v]."""
        rotated = self.head_size - self.not_rotated
        latent, shared = self.linear_kv_down_proj(x).split((self.kv_rank, rotated), -1)
        if self.kv_layernorm is not None:
            latent = self.kv_layernorm(latent)
        kv = _heads(self.linear_kv_up_proj(latent), self.not_rotated + self.value_size)
        # every rank's heads use it: its gradient is summed over them
        if self.splits_sequence:
            shared = gather_from_sequence_region(shared.contiguous(), self.group)
        else:
            shared = copy_to_tensor_region(shared, self.group)
        # one head [b, 1, s, r]
        turning = _heads(shared, rotated)
        if rotary is not None:
            turning = self._rotate(turning, rotary)
        still, v = kv.split((self.not_rotated, self.value_size), -1)
        k = torch.cat((still, turning.expand(-1, still.shape[1], -1, -1)), -1)
        return k, v

    def _rotate(self, x: Tensor, rotary: Tables) -> Tensor:
        """[b, a, s, r], turned; where pairs are neighbours, their first numbers come before their second ones."""
        if self.interleaved:
            # queries and keys alike, so that the scores are the same
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x.contiguous(), rotary)


def _heads(y: Tensor, size: int) -> Tensor:
    """[s, b, a size] -> [b, a, s, size], a view."""
    return y.unflatten(-1, (-1, size)).permute(1, 2, 0, 3)


def _latent_norm(build: Build, spec: TransformerLayerSpec, size: int) -> nn.Module | None:
    """The norm of a latent, if the configuration wants one."""
    config = build.config
    if not config.qk_layernorm:
        return None
    if config.latent_layernorm_epsilon is not None:
        config = replace(config, layernorm_epsilon=config.latent_layernorm_epsilon)
    return spec.norm(replace(build, config=config), size)
