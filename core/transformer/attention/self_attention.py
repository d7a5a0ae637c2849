"""Self-attention with heads split over the tensor ranks: MHA, GQA and MQA in one fused projection.

Letters: s sequence, b microbatch, h hidden, a heads, g query groups, q heads per group, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.autograd import notes_activations
from core.context_parallel import (
    Documents,
    Exchange,
    context_attention,
    document_rows,
    has_kernel,
    visible_mask,
    within_window,
)
from core.parallel_state import Init, seeded
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, sum_gradients_of_foreign
from core.transformer.attention.kv_cache import LayerCache
from core.transformer.attention.qkv import Tables, rotate, split_qkv
from core.transformer.dropout import Dropout
from core.transformer.spec import Build, TransformerLayerSpec

# most queries of one strip under a window: the mask of a strip is at most [STRIP, STRIP + window]
STRIP = 1024


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v through torch's scaled_dot_product_attention; no parameters.

    The configuration's `score_scale` takes the place of 1 / sqrt(d). Values may be of another size than keys (latent
    attention): the fused kernels are given zeros beside the smaller ones.

    In a layer with a window a token sees that many tokens, itself included (Mistral 7B, arXiv 2310.06825).
    Context ranks exchange keys, or heads; at cp 1 there are no collectives.
    """

    # its queries are this context rank's rows, their keys lie on all context ranks
    knows_context = True

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.grouped = config.groups != config.num_attention_heads
        # None: 1 / sqrt(d), which torch computes itself
        scale = config.score_scale(build.layer)
        has_other_scale = scale != config.head_size**-0.5 or config.multi_latent_attention
        self.softmax_scale = scale if has_other_scale else None
        self.dropout = Dropout(build, config.attention_dropout, "attention", sharded=True)
        if config.windows is not None:
            self.window = config.windows[build.layer]
        else:
            self.window = None
        self.exchange = Exchange(build.parallel)
        self.stage = build.stage

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: "Tensor | Documents | None" = None
    ) -> Tensor:
        """q [b, a/tp, n, d], k [b, g/tp, t, d], v [b, g/tp, t, d'] -> [b, a/tp, n, d'].

        The n queries are the last of t tokens.

        Over context ranks n = t = s/cp. attention_mask: None is causal, else documents, or bool [b, 1, n, t], True =
        masked out (on one context rank).
        """
        if v.shape[3] != q.shape[3]:
            return self._padded(q, k, v, attention_mask)
        if self.training:
            p = self.dropout.p
        else:
            p = 0.0
        documents = None
        if isinstance(attention_mask, Documents):
            documents = attention_mask
        # no kernel that merges blocks drops out
        if documents is not None and p > 0:
            attention_mask = visible_mask(documents.begin)
            documents = None
        splits_rows = self.exchange.rows.size > 1 and not self.stage.whole_sequences
        if splits_rows or documents is not None or self._keeps_output(q, k, attention_mask, p):
            return self._attend_rows(q, k, v, documents)
        assert not isinstance(attention_mask, Documents)
        if p > 0:
            return self._attend_with_dropout(q, k, v, attention_mask, p)
        if self._has_long_strips(k):
            return self._attend_in_strips(q, k, v, attention_mask, 0.0)
        return self._attend(q, k, v, attention_mask, 0.0)

    def _padded(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: "Tensor | Documents | None"
    ) -> Tensor:
        """With zeros up to one size: they add nothing to scores, and their columns of the output are cut off."""
        size = v.shape[3]
        width = max(size, q.shape[3])
        q = _as_wide_as(width, q)
        k = _as_wide_as(width, k)
        v = _as_wide_as(width, v)
        return self.forward(q, k, v, attention_mask)[..., :size]

    def _keeps_output(
        self, q: Tensor, k: Tensor, attention_mask: "Tensor | Documents | None", p: float
    ) -> bool:
        """Whether a recomputed forward takes over the output, which torch's own attention does not hand out whole."""
        causal = attention_mask is None and q.shape[2] == k.shape[2]
        if p > 0 or not causal or torch.compiler.is_compiling() or not notes_activations():
            return False
        return has_kernel(q, k)

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        """This rank's rows with the keys that each of them sees, wherever these are."""
        kind = q.device.type
        # as for torch's own attention
        if torch.is_autocast_enabled(kind):
            q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        if self.window is not None:
            rows = self.exchange.rows
            numbers = document_rows(q.shape[2] * rows.size, rows)
            documents = within_window(documents, self.window, numbers, q.device)
        if self.softmax_scale is not None:
            scale = self.softmax_scale
        else:
            scale = q.shape[3] ** -0.5
        return context_attention(q, k, v, self.exchange, documents=documents, scale=scale)

    def _has_long_strips(self, k: Tensor) -> bool:
        """Whether there are keys that some query does not see because of the window."""
        return self.window is not None and k.shape[2] > self.window

    # The compiler's own random numbers would not follow the seed, and another mask would be drawn.
    @torch.compiler.disable
    def _attend_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, p: float
    ) -> Tensor:
        if self._has_long_strips(k):
            attend = self._attend_in_strips
        else:
            attend = self._attend
        with seeded(q.device, self.dropout.seed()):
            return attend(q, k, v, attention_mask, p)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, p: float
    ) -> Tensor:
        queries = q.shape[2]
        keys = k.shape[2]
        visible = None if attention_mask is None else ~attention_mask
        causal = False
        # a branch: compiled code with lengths that vary has no bool of them
        if visible is None and queries == keys:
            causal = True
        if visible is None and 1 < queries < keys:
            # a chunk of a prompt behind cached keys: torch's causal mask would align at the first key
            visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(
                keys - queries
            )
        return F.scaled_dot_product_attention(
            q, k, v, visible, p, causal, scale=self.softmax_scale, enable_gqa=self.grouped
        )

    def _attend_in_strips(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, p: float
    ) -> Tensor:
        """Strip by strip of queries, each with the keys that its windows reach: nothing of size [n, t].

        A mask of the user's own takes the place of the causal one, as without a window: later keys are there, too.
        """
        assert self.window is not None
        queries = q.shape[2]
        earlier = k.shape[2] - q.shape[2]
        outputs = []
        for start in range(0, queries, STRIP):
            stop = min(start + STRIP, queries)
            first = max(0, earlier + start - self.window + 1)
            if attention_mask is None:
                last = earlier + stop
            else:
                last = k.shape[2]
            query = torch.arange(earlier + start, earlier + stop, device=q.device)[:, None]
            distance = query - torch.arange(first, last, device=q.device)
            visible = distance < self.window
            if attention_mask is None:
                visible &= distance >= 0
            else:
                visible = visible & ~attention_mask[..., start:stop, first:last]
            strip = q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last]
            attended = F.scaled_dot_product_attention(
                *strip, visible, p, scale=self.softmax_scale, enable_gqa=self.grouped
            )
            outputs.append(attended)
        return torch.cat(outputs, 2)


def _as_wide_as(width: int, x: Tensor) -> Tensor:
    """[..., d] with zeros up to `width`."""
    if x.shape[-1] == width:
        return x
    return F.pad(x, (0, width - x.shape[-1]))


class SelfAttention(nn.Module):
    """x [s, b, h] -> [s, b, h] ([s/tp, b, h] each way under sequence parallelism).

    linear_qkv.weight [g/tp, q+2, d, h]: of each group its query heads, then key, then value, so that tensor
    parallelism is a plain slice of groups. linear_proj.weight [h, a d/tp].
    """

    knows_context = True
    cache_of_layer: LayerCache | None  # while tokens are generated: see `KVCache.used_by`

    def __init__(self, build: Build, spec: TransformerLayerSpec) -> None:
        super().__init__()
        config = build.config
        place = build.place
        heads_per_group = config.num_attention_heads // config.groups
        # Tensor ranks share groups, never a head: a group's queries stay with their key and value.
        self.groups = config.groups // place.tp
        self.head_size = config.head_size
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (config.groups, heads_per_group + 2, config.head_size),
            place=place,
            bias=config.add_bias_linear or config.add_qkv_bias,
            init=Init(std=config.init_method_std),
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.head_size,
            config.hidden_size,
            place=place,
            bias=config.add_bias_linear,
            init=Init(std=config.output_std),
        )
        self.core_attention = spec.core_attention(build)
        self.layer_number = build.layer
        self.cache_of_layer = None
        self.q_layernorm = _qk_norm(build, spec, config.num_attention_heads)
        self.k_layernorm = _qk_norm(build, spec, config.groups)
        for submodule in (self.core_attention, self.q_layernorm, self.k_layernorm):
            # whatever it is, it sees this rank's heads only
            if submodule is not None:
                sum_gradients_of_foreign(submodule, place.group)

    def forward(
        self,
        x: Tensor,
        attention_mask: "Tensor | Documents | None" = None,
        rotary: Tables | None = None,
    ) -> Tensor:
        """See the class; `rotary` is (cos, sin), each [b or 1, 1, s, d/2]."""
        y = self.linear_qkv(x)
        # Qwen3 normalises query and key heads before they are rotated; without norms both happen in one pass.
        if self.q_layernorm is None or self.k_layernorm is None:
            q, k, v = split_qkv(y, self.groups, self.head_size, rotary)
        else:
            q, k, v = split_qkv(y, self.groups, self.head_size, None)
            q = self.q_layernorm(q)
            k = self.k_layernorm(k)
            if rotary is not None:
                q = rotate(q, rotary)
                k = rotate(k, rotary)
        # While text is generated, keys and values of earlier tokens come from the cache.
        if self.cache_of_layer is not None:
            k, v, padding = self.cache_of_layer.extend(k, v)
            if padding is not None:
                attention_mask = padding
        heads = self.core_attention(q, k, v, attention_mask)
        # [s, b, a d]
        return self.linear_proj(heads.permute(2, 0, 1, 3).flatten(2))


def _qk_norm(build: Build, spec: TransformerLayerSpec, heads: int) -> nn.Module | None:
    """The norm of query or key heads, if the configuration wants one."""
    if not build.config.qk_layernorm:
        return None
    if spec.qk_norm is not None:
        return spec.qk_norm(build, heads)
    return spec.norm(build, build.config.head_size, over_heads=True)
