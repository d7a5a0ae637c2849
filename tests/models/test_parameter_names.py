"""Patterns of Hugging Face's names, told in ours."""

import pytest
import torch
import transformers

from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface
from core.models.huggingface.parameter_names import _theirs, told_of
from core.parallel_state import ParallelState
from tests.models.huggingface import TODAY
from tests.models.test_huggingface import COMMON

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}


def names_of(config):
    with torch.device("meta"):
        model = GPTModel(**from_huggingface(config).arguments(), parallel=ParallelState.single("cpu"), seed=0)
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("family", TODAY)
def test_every_family_is_known_by_its_names(family):
    names = names_of(TODAY[family]())
    assert _theirs(names).keys() == set(names)


TOLD = {
    "model.embed_tokens.*": "embedding.word_embeddings.weight",
    "model.embed_tokens": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "model.layers.0.*": "decoder.layers.0.*",
    "model.layers.*": "decoder.layers.*",
    "model.layers.*.mlp.*": "decoder.layers.*.mlp.linear_fc1.weight, decoder.layers.*.mlp.linear_fc2.weight",
    "*.post_attention_layernorm.*": "decoder.layers.*.pre_mlp_layernorm.weight",
    "lm_head.*": "output_layer.weight",
}


@pytest.mark.parametrize("pattern", TOLD)
def test_their_names_are_told_in_ours(pattern):
    names = names_of(transformers.LlamaConfig(**COMMON))
    assert told_of(pattern, names) == f"; these names of Hugging Face's are {TOLD[pattern]} here"


def test_what_is_held_together_and_tied_is_told():
    names = names_of(transformers.LlamaConfig(**COMMON | {"tie_word_embeddings": True}))
    assert told_of("lm_head.weight", names).endswith("(word_embeddings holds embed_tokens, lm_head together)")
    assert "are decoder.layers.*.self_attention.linear_qkv.weight here (linear_qkv holds q_proj, k_proj, v_proj" in (
        told_of("q_proj", names)
    )
    # OLMo2's norm of that name stands elsewhere
    names = names_of(TODAY["olmo2"]())
    assert "decoder.layers.*.post_self_attn_layernorm.weight" in told_of("*.post_attention_layernorm.*", names)
    assert "decoder.layers.1.*" in told_of("transformer.h.1.*", names_of(transformers.GPT2Config(**GPT2)))


def test_ours_without_an_end_and_names_of_nobody():
    names = names_of(transformers.LlamaConfig(**COMMON))
    assert told_of("embedding.word_embeddings", names) == "; give 'embedding.word_embeddings.*'"
    assert not told_of("embeding.*", names) and not told_of("anything", ["weight", "bias"])
