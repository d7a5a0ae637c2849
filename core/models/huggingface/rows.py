"""Which of our parameters is made of which Hugging Face tensors: one row each, of one layer or of the model."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from core.models.huggingface.blocks import (
    Block,
    Kind,
    gate_up,
    gate_up_fused,
    heads,
    qkv,
    qkv_fused,
    qkv_fused_transposed,
    same,
    transposed,
)
from core.models.huggingface.expert_blocks import (
    expert_gate_up,
    experts,
    stacked_experts,
    stacked_gate_up,
)
from core.parallel_state.layout import Slices
from core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Row:
    """`ours <- kind(hf_names...)`; `{n}` stands for the number of a layer in both, `{e}` in names for each expert."""

    ours: str
    kind: Kind
    hf_names: tuple[str, ...]

    def of_layer(self, number: int) -> "Row":
        """The row of one layer."""
        name = self.ours.replace("{n}", str(number))
        return Row(
            name, self.kind, tuple(hf_name.replace("{n}", str(number)) for hf_name in self.hf_names)
        )

    def of_experts(self, count: int) -> "Row":
        """The row with every expert's name: of the first name all experts, then of the next."""
        names: list[str] = []
        for name in self.hf_names:
            names += [name.replace("{e}", str(expert)) for expert in range(count)]
        return Row(self.ours, self.kind, tuple(names))

    def blocks(self, box: Slices, config: TransformerConfig) -> list[Block]:
        """The blocks of Hugging Face tensors that a box of ours is made of; the box has starts and stops."""
        return list(self.kind.blocks(self.hf_names, box, config))

    def huggingface_shapes(
        self, shape: tuple[int, ...], config: TransformerConfig
    ) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape, where ours is a tensor of `shape`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for block in self.blocks(tuple(slice(0, size) for size in shape), config):
            # the blocks cover each of their tensors: the largest stop along each dim is its size
            stops = tuple(interval.stop for interval in block.hf_slices)
            before = shapes.get(block.name, stops)
            shapes[block.name] = tuple(map(max, before, stops))
        return shapes


def rows_of(
    table: Iterable[Row], layers: Collection[int], num_experts: int | None = None
) -> dict[str, Row]:
    """Our name -> row, for these layers of a model. Without experts there are no rows of any."""
    rows: dict[str, Row] = {}
    for row in table:
        # experts are one stacked parameter of ours, and one tensor each of theirs
        if "{e}" in row.hf_names[0]:
            row = row.of_experts(num_experts or 0)
        if not row.hf_names:
            continue
        if "{n}" in row.ours:
            numbered = [row.of_layer(number) for number in layers]
        else:
            numbered = [row]
        rows |= {numbered_row.ours: numbered_row for numbered_row in numbered}
    return rows


def _with_biases(table: Mapping[tuple[str, Kind], tuple[str, ...]]) -> tuple[Row, ...]:
    """A row for the weight and one for the bias, laid out alike. One that a model does not have is skipped."""
    rows = []
    for (ours, kind), hf_names in table.items():
        for suffix in ("weight", "bias"):
            theirs = tuple(f"{name}.{suffix}" for name in hf_names)
            rows.append(Row(f"{ours}.{suffix}", kind, theirs))
    return tuple(rows)


_OURS = "decoder.layers.{n}."
_LLAMA = "model.layers.{n}."
_GPT2 = "transformer.h.{n}."

# what Llama and its relatives have in common; they differ in their norms and in the fused linears
_SHARED = {
    ("embedding.word_embeddings", same): ("model.embed_tokens",),
    ("decoder.final_layernorm", same): ("model.norm",),
    ("output_layer", same): ("lm_head",),
    (f"{_OURS}self_attention.linear_proj", same): (f"{_LLAMA}self_attn.o_proj",),
    (f"{_OURS}mlp.linear_fc2", same): (f"{_LLAMA}mlp.down_proj",),
}
_APART = {
    (f"{_OURS}self_attention.linear_qkv", qkv): tuple(
        f"{_LLAMA}self_attn.{letter}_proj" for letter in "qkv"
    ),
    (f"{_OURS}self_attention.q_layernorm", same): (f"{_LLAMA}self_attn.q_norm",),
    (f"{_OURS}self_attention.k_layernorm", same): (f"{_LLAMA}self_attn.k_norm",),
    (f"{_OURS}mlp.linear_fc1", gate_up): (f"{_LLAMA}mlp.gate_proj", f"{_LLAMA}mlp.up_proj"),
}
_NORMS_BEFORE = {
    (f"{_OURS}input_layernorm", same): (f"{_LLAMA}input_layernorm",),
    (f"{_OURS}pre_mlp_layernorm", same): (f"{_LLAMA}post_attention_layernorm",),
}
_NORMS_AFTER = {
    (f"{_OURS}post_self_attn_layernorm", same): (f"{_LLAMA}post_attention_layernorm",),
    (f"{_OURS}post_mlp_layernorm", same): (f"{_LLAMA}post_feedforward_layernorm",),
}
_NORMS_AROUND = _NORMS_AFTER | {
    (f"{_OURS}input_layernorm", same): (f"{_LLAMA}input_layernorm",),
    (f"{_OURS}pre_mlp_layernorm", same): (f"{_LLAMA}pre_feedforward_layernorm",),
}

_LLAMA_TABLE = _SHARED | _APART | _NORMS_BEFORE
LLAMA_ROWS = _with_biases(_LLAMA_TABLE)
OLMO2_ROWS = _with_biases(_SHARED | _APART | _NORMS_AFTER)
GEMMA3_ROWS = _with_biases(_SHARED | _APART | _NORMS_AROUND)

# The names of experts in files; in memory transformers has one form for all families.
_EXPERTS = f"{_OURS}mlp.experts."
_WITHOUT_MLP = _with_biases(
    {
        key: names
        for key, names in (_SHARED | _APART | _NORMS_BEFORE).items()
        if ".mlp." not in key[0]
    }
)
MIXTRAL_ROWS = (
    *_WITHOUT_MLP,
    Row(f"{_OURS}mlp.router.weight", same, (f"{_LLAMA}block_sparse_moe.gate.weight",)),
    Row(
        f"{_EXPERTS}linear_fc1.weight",
        expert_gate_up,
        (
            f"{_LLAMA}block_sparse_moe.experts.{{e}}.w1.weight",
            f"{_LLAMA}block_sparse_moe.experts.{{e}}.w3.weight",
        ),
    ),
    Row(
        f"{_EXPERTS}linear_fc2.weight",
        experts,
        (f"{_LLAMA}block_sparse_moe.experts.{{e}}.w2.weight",),
    ),
)
# in layers with experts a router, its bias and shared ones: what a family has of these
_ROUTER_AND_SHARED = (
    Row(f"{_OURS}mlp.router.weight", same, (f"{_LLAMA}mlp.gate.weight",)),
    Row(f"{_OURS}mlp.router.expert_bias", same, (f"{_LLAMA}mlp.gate.e_score_correction_bias",)),
    Row(
        f"{_OURS}mlp.shared_experts.linear_fc1.weight",
        gate_up,
        (
            f"{_LLAMA}mlp.shared_experts.gate_proj.weight",
            f"{_LLAMA}mlp.shared_experts.up_proj.weight",
        ),
    ),
    Row(
        f"{_OURS}mlp.shared_experts.linear_fc2.weight",
        same,
        (f"{_LLAMA}mlp.shared_experts.down_proj.weight",),
    ),
)
_EXPERTS_APART = (
    Row(
        f"{_EXPERTS}linear_fc1.weight",
        expert_gate_up,
        (
            f"{_LLAMA}mlp.experts.{{e}}.gate_proj.weight",
            f"{_LLAMA}mlp.experts.{{e}}.up_proj.weight",
        ),
    ),
    Row(f"{_EXPERTS}linear_fc2.weight", experts, (f"{_LLAMA}mlp.experts.{{e}}.down_proj.weight",)),
)
_EXPERTS_STACKED = (
    Row(f"{_EXPERTS}linear_fc1.weight", stacked_gate_up, (f"{_LLAMA}mlp.experts.gate_up_proj",)),
    Row(f"{_EXPERTS}linear_fc2.weight", stacked_experts, (f"{_LLAMA}mlp.experts.down_proj",)),
)

# latents instead of a fused query, key and value; names of the query's depend on whether it has one
_LATENTS = {
    (f"{_OURS}self_attention.linear_q_proj", heads): (f"{_LLAMA}self_attn.q_proj",),
    (f"{_OURS}self_attention.linear_q_down_proj", same): (f"{_LLAMA}self_attn.q_a_proj",),
    (f"{_OURS}self_attention.q_layernorm", same): (f"{_LLAMA}self_attn.q_a_layernorm",),
    (f"{_OURS}self_attention.linear_q_up_proj", heads): (f"{_LLAMA}self_attn.q_b_proj",),
    (f"{_OURS}self_attention.linear_kv_down_proj", same): (
        f"{_LLAMA}self_attn.kv_a_proj_with_mqa",
    ),
    (f"{_OURS}self_attention.kv_layernorm", same): (f"{_LLAMA}self_attn.kv_a_layernorm",),
    (f"{_OURS}self_attention.linear_kv_up_proj", heads): (f"{_LLAMA}self_attn.kv_b_proj",),
    (f"{_OURS}mlp.linear_fc1", gate_up): (f"{_LLAMA}mlp.gate_proj", f"{_LLAMA}mlp.up_proj"),
}
_DEEPSEEK = (*_with_biases(_SHARED | _LATENTS | _NORMS_BEFORE), *_ROUTER_AND_SHARED)

# dense layers and layers with experts; stacked as transformers has them in memory
MOE_ROWS = (*LLAMA_ROWS, *_ROUTER_AND_SHARED, *_EXPERTS_APART)
STACKED_ROWS = (*LLAMA_ROWS, *_ROUTER_AND_SHARED, *_EXPERTS_STACKED)
DEEPSEEK_ROWS = (*_DEEPSEEK, *_EXPERTS_APART)
STACKED_DEEPSEEK_ROWS = (*_DEEPSEEK, *_EXPERTS_STACKED)

PHI3_ROWS = _with_biases(
    _SHARED
    | _NORMS_BEFORE
    | {
        (f"{_OURS}self_attention.linear_qkv", qkv_fused): (f"{_LLAMA}self_attn.qkv_proj",),
        (f"{_OURS}mlp.linear_fc1", gate_up_fused): (f"{_LLAMA}mlp.gate_up_proj",),
    }
)

GPT2_ROWS = _with_biases(
    {
        ("embedding.word_embeddings", same): ("transformer.wte",),
        ("embedding.position_embeddings", same): ("transformer.wpe",),
        ("decoder.final_layernorm", same): ("transformer.ln_f",),
        ("output_layer", same): ("lm_head",),
        (f"{_OURS}input_layernorm", same): (f"{_GPT2}ln_1",),
        (f"{_OURS}pre_mlp_layernorm", same): (f"{_GPT2}ln_2",),
        (f"{_OURS}self_attention.linear_qkv", qkv_fused_transposed): (f"{_GPT2}attn.c_attn",),
        (f"{_OURS}self_attention.linear_proj", transposed): (f"{_GPT2}attn.c_proj",),
        (f"{_OURS}mlp.linear_fc1", transposed): (f"{_GPT2}mlp.c_fc",),
        (f"{_OURS}mlp.linear_fc2", transposed): (f"{_GPT2}mlp.c_proj",),
    }
)
