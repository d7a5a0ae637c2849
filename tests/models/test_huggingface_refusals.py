"""What cannot be taken over from Hugging Face is refused by name: nothing is dropped, nothing guessed."""

import pytest
import torch
import transformers

from core.models.gpt import GPTModel, llama_spec
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.huggingface.families import FAMILIES
from core.models.huggingface.family.others import OTHERS
from core.parallel_state import ParallelState
from tests.models.test_huggingface import COMMON, CONFIGS


def model(kind, **more):
    ours = from_huggingface(CONFIGS[kind]()).arguments()
    return GPTModel(**ours | more, parallel=ParallelState.single("cpu"))


def weights(kind):
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    return theirs.state_dict()


def test_unknown_models_positions_and_windows():
    with pytest.raises(
        ValueError,
        match=r"model_type='bert' is not supported; known: deepseek_v2, deepseek_v3, gemma3_text, .* adds a family; "
        r"of this one: read as a Llama, it says .*, type_vocab_size",
    ):
        from_huggingface(transformers.BertConfig())
    with pytest.raises(ValueError, match="of this one: its fields are Llama's, so that what differs is in its code"):
        from_huggingface(transformers.HeliumConfig())
    with pytest.raises(ValueError, match=r"'llamb' is not .* of this one: it has no hidden_size, num_hidden_layers"):
        from_huggingface({"model_type": "llamb", "vocab_size": 9, "num_attention_heads": 2})
    for kind in ("yarn", "dynamic"):
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
        with pytest.raises(ValueError, match=f"rope_type='{kind}' is not supported; default, linear, llama3 are"):
            from_huggingface(transformers.LlamaConfig(**COMMON, rope_parameters=rope))


@pytest.mark.parametrize("kind", OTHERS)
def test_families_that_are_not_read_say_what_differs(kind):
    """By the names that transformers has for them; what differs is a fact of theirs."""
    with pytest.raises(ValueError) as error:
        from_huggingface(transformers.AutoConfig.for_model(kind))
    assert str(error.value) == f"model_type={kind!r} is not supported: {OTHERS[kind]}" and kind not in FAMILIES


GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 9, "num_hidden_layers": 2, "hidden_size": 8}
GEMMA3 |= {"intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 2.0}
LAYERED = [
    ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0 is not supported: nothing here caps"),
    ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0 is not supported: nothing here caps"),
    ({"use_bidirectional_attention": True}, r"use_bidirectional_attention=True .* attention is causal"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types names \['chunked_attention'\]"),
    ({"sliding_window": None}, r"sliding_window=None with layers of sliding_attention"),
    ({"rope_parameters": {"rope_theta": 5.0}}, r"is of one kind of layers; give those of full_attention and of"),
    ({"rope_scaling": YARN}, r"rope_type='yarn' is not supported"),
    ({"rope_parameters": {"sliding_attention": YARN}}, r"rope_type='yarn' is not supported"),
    ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, r"partial_rotary_factor=0.5 is not"),
    ({"attention_bias": True}, r"attention_bias=True is not supported"),
    ({"tie_word_embeddings": None}, r"tie_word_embeddings=None is neither true nor false"),
    ({"model_type": "gemma3"}, r"model_type='gemma3' is not supported: it holds a model of images and text; save"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers names 1 layers, num_hidden_layers=2"),
    ({"model_type": "olmo2", "rope_scaling": YARN}, r"rope_type='yarn' is not supported"),
]


@pytest.mark.parametrize("more, message", LAYERED)
def test_what_families_of_other_layers_cannot_say(more, message):
    from_huggingface(GEMMA3)
    with pytest.raises(ValueError, match=message):
        from_huggingface(GEMMA3 | more)


def test_the_text_model_of_a_gemma_3_of_images_is_saved_as_the_message_says(tmp_path):
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 101}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    both = transformers.Gemma3ForConditionalGeneration(config).eval()
    both.save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match=r"save its text model by itself, as Gemma3ForCausalLM"):
        from_huggingface(tmp_path / "both")
    alone = transformers.Gemma3ForCausalLM(both.config.text_config)
    alone.model = both.model.language_model
    alone.tie_weights()
    alone.save_pretrained(tmp_path / "text")
    ours = GPTModel(**from_huggingface(tmp_path / "text").arguments(), parallel=ParallelState.single("cpu")).eval()
    load_huggingface(ours, tmp_path / "text")
    tokens = torch.randint(101, (1, 8))
    torch.testing.assert_close(ours(tokens), both(tokens).logits, rtol=1e-4, atol=1e-5)


def test_scaled_positions_under_the_older_name():
    config = transformers.LlamaConfig(**COMMON)

    class Older:
        model_type, rope_parameters, rope_theta = "llama", None, 1e4
        rope_scaling = {"type": "dynamic", "factor": 2.0}

        def __getattr__(self, name):
            return getattr(config, name)

    with pytest.raises(ValueError, match="rope_type='dynamic' is not supported"):
        from_huggingface(Older())


@pytest.mark.parametrize(
    "config, message",
    [
        (
            lambda: transformers.LlamaConfig(**COMMON, attention_bias=True),
            "attention_bias=True with mlp_bias=False is not supported.*both True or both False",
        ),
        (lambda: transformers.LlamaConfig(**COMMON, mlp_bias=True), "attention_bias=False with mlp_bias=True"),
        (
            lambda: transformers.Qwen3Config(**COMMON, attention_bias=True),
            "attention_bias=True is not supported.*is attention_bias=False",
        ),
        (lambda: transformers.GPT2Config(scale_attn_weights=False), "scale_attn_weights=False .*use True"),
        (
            lambda: transformers.GPT2Config(scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx=True .*use False",
        ),
        (lambda: transformers.GPT2Config(add_cross_attention=True), "add_cross_attention=True .*use False"),
        (
            lambda: transformers.GPT2Config(embd_pdrop=0.0),
            "embd_pdrop=0.0 with resid_pdrop=0.1 .*set them to the same value",
        ),
    ],
)
def test_flags_that_change_the_numbers(config, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(config())


def test_code_of_the_folder_is_refused_unless_it_is_a_copy_of_theirs():
    said = transformers.LlamaConfig(**COMMON).to_dict()
    with pytest.raises(
        ValueError, match=r"code of the folder \(modeling.MyModel\), not transformers' LlamaForCausalLM"
    ):
        from_huggingface(said | {"auto_map": {"AutoModelForCausalLM": "modeling.MyModel"}})
    from_huggingface(said | {"auto_map": {"AutoModelForCausalLM": "hub/llama--modeling_llama.LlamaForCausalLM"}})
    from_huggingface(said | {"auto_map": {"AutoConfig": "configuration.LlamaConfig"}})


def test_all_flags_are_told_at_once():
    with pytest.raises(ValueError, match=r"scale_attn_weights=False.*add_cross_attention=True.*embd_pdrop"):
        from_huggingface(transformers.GPT2Config(scale_attn_weights=False, add_cross_attention=True, embd_pdrop=0.5))


def test_weights_of_another_size():
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | {"vocab_size": 102}))
    with pytest.raises(ValueError, match=r"word_embeddings.weight is \(101, 32\) here and \(102, 32\)"):
        load_huggingface(model("llama"), other.state_dict())
    fewer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON | {"num_key_value_heads": 2}))
    with pytest.raises(
        ValueError, match=r"have \(32, 8, 8\) rows in the Hugging Face weights, expected \(32, 16, 16\)"
    ):
        load_huggingface(model("llama"), fewer.state_dict())


def test_weights_without_a_head_for_an_untied_model():
    tied = weights("llama-tied")
    del tied["lm_head.weight"]
    with pytest.raises(ValueError, match=r"no counterpart of output_layer.weight"):
        load_huggingface(model("llama"), tied)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt2-untied"])
def test_known_buffers_are_no_weights(kind):
    state = weights(kind)
    if kind == "llama":
        state |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
        state |= {"model.rotary_emb.inv_freq": torch.ones(2)}
    else:
        state |= {
            "transformer.h.1.attn.bias": torch.ones(1, 1, 4, 4),
            "transformer.h.1.attn.masked_bias": torch.ones(1),
        }
    load_huggingface(model(kind), state)


@pytest.mark.parametrize("name", ["self_attn.o_proj.bias", "self_attn.q_proj.bias", "mlp.up_proj.bias", "adapter"])
def test_a_tensor_that_would_be_dropped(name):
    with pytest.raises(ValueError, match=rf"^1 of the .* no place in the model: model.layers.1.{name};"):
        load_huggingface(model("llama"), weights("llama") | {f"model.layers.1.{name}": torch.ones(32)})


def test_many_that_would_be_dropped_are_counted():
    with pytest.raises(ValueError, match=r"^14 of the .*: model.layers.0.self_attn.q_proj.bias, .* and 11 more;"):
        load_huggingface(model("llama"), weights("llama-biased"))
    deeper = {f"model.layers.2.mlp.extra{n}": torch.ones(2) for n in range(2)}
    with pytest.raises(ValueError, match=r"^2 of the .*: model.layers.2.mlp.extra0, model.layers.2.mlp.extra1;"):
        load_huggingface(model("llama"), weights("llama") | deeper)


def test_parts_that_the_spec_leaves_out():
    """The weights were read under the configuration's names, but nothing of this model takes them."""
    with pytest.raises(ValueError, match=r"^1 of the .*: transformer.wpe.weight;"):
        load_huggingface(model("gpt2", transformer_layer_spec=llama_spec()), weights("gpt2"))


def test_a_head_unlike_the_table_of_a_tied_model():
    for kind, untied in (("llama-tied", "llama"), ("gpt2", "gpt2-untied")):
        with pytest.raises(ValueError, match=r"lm_head.weight differs from the embedding.*tie_word_embeddings=False"):
            load_huggingface(model(kind), weights(untied))
        same = weights(kind)
        same["lm_head.weight"] = same["lm_head.weight"].clone()
        load_huggingface(model(kind), same)


@pytest.mark.parametrize("kind, prefix", [("llama", "model."), ("gpt2", "transformer.")])
def test_names_without_the_prefix_of_a_whole_model(kind, prefix):
    bare = {name.removeprefix(prefix): tensor for name, tensor in weights(kind).items()}
    with pytest.raises(ValueError, match=f"AutoModelForCausalLM, or put '{prefix}' before"):
        load_huggingface(model(kind), bare)
    with pytest.raises(ValueError, match=r"none of transformer.wte.weight, model.embed_tokens.weight.*: spam"):
        load_huggingface(model(kind), {"spam": torch.ones(1)})


@pytest.mark.parametrize(
    "kind, name",
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama-biased", "model.layers.0.self_attn.o_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight"),
        ("gpt2", "transformer.h.1.mlp.c_fc.bias"),
        ("gpt2", "transformer.wpe.weight"),
    ],
)
def test_a_tensor_that_is_missing(kind, name):
    state = weights(kind)
    del state[name]
    with pytest.raises(ValueError, match=f"the Hugging Face weights lack {name}, which"):
        load_huggingface(model(kind), state)


def test_a_pipeline_stage_takes_its_part():
    """A stage holds a part of the names only; that is no reason to refuse the rest."""
    state = weights("gpt2-untied")
    first = model("gpt2-untied", pre_process=True, post_process=False, layers=range(1))
    last = model("gpt2-untied", pre_process=False, post_process=True, layers=range(1, 2))
    for stage in (first, last):
        load_huggingface(stage, state)
    assert torch.equal(last.output_layer.weight[:101], state["lm_head.weight"])
    assert not torch.isnan(torch.cat([p.flatten() for p in first.parameters()])).any()
