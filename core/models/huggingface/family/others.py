"""Families that are known and not read, by model_type: what in them nothing here computes."""

_BESIDE = (
    "attention and MLP lie beside each other there, of the same input; here one follows the other"
)
_PAIRS = (
    "rotary positions turn neighbouring numbers of a head there, here numbers half a head apart"
)
_LINEAR = "layers of it have linear attention (gated delta rule), which nothing here computes"
_STATES = "its layers are state spaces, not attention"
_ALIBI = "its positions are a bias of the scores (ALiBi)"

OTHERS = {
    "bloom": _ALIBI,
    "cohere": f"{_BESIDE}; {_PAIRS}",
    "cohere2": f"{_BESIDE}; {_PAIRS}",
    "exaone4": "norms are after attention and MLP only (as in olmo2), and in each query and key head (as in qwen3)",
    "falcon": _BESIDE,
    "gemma": "its norms multiply by 1 + weight before attention and MLP only; gemma3_text has four in a layer",
    "gemma2": "attn_logit_softcapping and final_logit_softcapping cap scores and logits; nothing here caps",
    "gemma3": "it holds a model of images and text; save its text model by itself, as Gemma3ForCausalLM with "
    "config.text_config (model_type gemma3_text)",
    "gemma3n": "it mixes several residual streams, and has an embedding in each layer",
    "glm": _PAIRS,
    "glm4": _PAIRS,
    "gpt_neox": f"use_parallel_residual: {_BESIDE}",
    "gpt_oss": "attention has a learned sink in each head, experts and the router have biases, and the gate of an "
    "expert is clamped",
    "gptj": f"{_BESIDE}; {_PAIRS}",
    "granite": "residual_multiplier and logits_scaling multiply what nothing here does; where both are 1, "
    "docs/recipes/add_a_model.md adds it",
    "llama4_text": "attention is cut into chunks, scores of layers without positions are scaled by position, and an "
    "expert's weight multiplies its input",
    "mamba": _STATES,
    "mamba2": _STATES,
    "ministral3": "queries are scaled by their position (llama_4_scaling_beta), rotary positions by YaRN",
    "mpt": _ALIBI,
    "nemotron": "its LayerNorm multiplies by 1 + weight",
    "olmo": "its LayerNorm has no weight",
    "olmoe": "norms of query and key are over all heads together (as olmo2), with norms before attention and experts",
    "opt": "its learned positions begin at row 2 of their table",
    "phi": f"{_BESIDE}; the output layer has a bias",
    "phimoe": "its experts are chosen one after the other, each with scores masked around its own (sparsemixer)",
    "qwen2_moe": "the shared expert is multiplied by a gate of its own (shared_expert_gate)",
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "stablelm": "it has LayerNorm beside an MLP with a gate; with qk_layernorm a norm for each head",
    "starcoder2": "it has LayerNorm and an MLP without a gate beside rotary positions",
}
