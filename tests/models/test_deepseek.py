"""DeepSeek-V3, DeepSeek-V2 and Kimi-K2 beside what every family is tested for: published facts, refusals, a run."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.huggingface.exporting import export_huggingface
from core.models.huggingface.importing import import_huggingface
from core.parallel_state import ParallelState
from core.pretrain import main as pretrain
from core.training import initialize
from core.training.config.sources import load_run
from tests.models.huggingface import LATENT, TODAY, YARN, random_model
from tests.models.test_huggingface import COMMON
from tests.training.tiny import prepared

# of the makers' config.json files; DeepSeek-V3's without `quantization_config`, as its converted weights have it
SHARED = {"attention_bias": False, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432}
SHARED |= {"kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_shared_experts": 1}
SHARED |= {"norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61, "q_lora_rank": 1536}
SHARED |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid"}
SHARED |= {"seq_aux": True, "aux_loss_alpha": 0.001, "topk_method": "noaux_tc", "v_head_dim": 128}
SHARED |= {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
SCALED = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
PUBLISHED = {
    "deepseek-v3": SHARED
    | {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "ep_size": 1}
    | {"n_routed_experts": 256, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280}
    | {"max_position_embeddings": 163840, "rope_theta": 10000, "routed_scaling_factor": 2.5}
    | {"num_nextn_predict_layers": 1, "rope_scaling": SCALED | {"factor": 40, "beta_fast": 32, "beta_slow": 1}},
    "kimi-k2": SHARED
    | {"model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840}
    | {"max_position_embeddings": 131072, "rope_theta": 50000.0, "routed_scaling_factor": 2.827}
    | {"num_nextn_predict_layers": 0, "rope_scaling": SCALED | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}},
}


@pytest.mark.parametrize("name, billions", [("deepseek-v3", 671), ("kimi-k2", 1026)])
def test_published_configurations_are_read_without_a_word(name, billions):
    """As many parameters as transformers' class of the same sizes has."""
    ours = from_huggingface(PUBLISHED[name])
    assert ours.config.rotary_scaling.score_factor > 1.7 and ours.config.rotary_interleaved
    with torch.device("meta"):
        model = GPTModel(**ours.arguments() | {"max_sequence_length": 8}, parallel=ParallelState.single("cpu"))
        fields = {k: v for k, v in PUBLISHED[name].items() if k not in ("model_type", "auto_map")}
        theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields))
    assert model.num_parameters() == theirs.num_parameters() and model.num_parameters() // 10**9 == billions


def test_kimi_is_read_as_what_it_is():
    """Another name of the same fields: the same form, and another name still is refused."""
    fields = TODAY["deepseek_v3"]().to_dict()
    assert from_huggingface(fields | {"model_type": "kimi_k2"}) == from_huggingface(fields)
    with pytest.raises(ValueError, match="model_type='kimi_k9' is not supported"):
        from_huggingface(fields | {"model_type": "kimi_k9"})


def test_the_bias_of_experts_stays_as_in_transformers():
    fields = TODAY["deepseek_v3"]().to_dict()
    assert from_huggingface(fields).config.moe_router_enable_expert_bias
    assert from_huggingface(fields).config.moe_router_bias_update_rate == 0.0


V3, V2 = (TODAY[kind]().to_dict() for kind in ("deepseek_v3", "deepseek_v2"))
REFUSED = [
    (V3, {"attention_bias": True}, r"attention_bias=True is not supported"),
    (V3, {"num_key_value_heads": 4}, r"num_key_value_heads=4 with num_attention_heads=8"),
    (V3, {"head_dim": 6}, r"head_dim=6 contradicts qk_nope_head_dim and qk_rope_head_dim=8, which make it 8; remove"),
    (V3, {"scoring_func": "softmax"}, r"scoring_func='softmax' is not this family's; sigmoid is"),
    (V3, {"topk_method": "greedy"}, r"topk_method='greedy' is not this family's; noaux_tc is"),
    (V3, {"moe_layer_freq": 2}, r"moe_layer_freq=2: .*set it to 1"),
    (V3, {"norm_topk_prob": False}, r"norm_topk_prob=False with num_experts_per_tok=2"),
    (V3, {"rope_parameters": YARN | {"mscale_all_dim": 0}}, r"mscale=0.7 with mscale_all_dim=None has several"),
    (V3, {"rope_parameters": YARN | {"truncate": False}}, r"truncate=False is not supported"),
    (V3, {"rope_parameters": YARN | {"rope_type": "linear"}}, r"mscale_all_dim=1.3 with rope_type='linear'"),
    (V3, {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=.*dequantize the weights"),
    (V2, {"norm_topk_prob": True}, r"norm_topk_prob=True is not supported"),
    (V2, {"topk_method": "noaux_tc"}, r"topk_method='noaux_tc' is not .*; greedy, group_limited_greedy is"),
    (V2, {"mlp_bias": True}, r"mlp_bias=True is not supported"),
]


@pytest.mark.parametrize("fields, change, message", REFUSED)
def test_what_is_not_here_is_refused(fields, change, message):
    from_huggingface(fields)
    with pytest.raises(ValueError, match=message):
        from_huggingface(fields | change)


def exported(theirs, tmp_path):
    """The folder of transformers, and what an import and an export make of it."""
    theirs.save_pretrained(tmp_path / "theirs")
    import_huggingface(tmp_path / "theirs", str(tmp_path / "ckpt"))
    export_huggingface(tmp_path / "ckpt", tmp_path / "ours", check=True)
    return tmp_path / "theirs", tmp_path / "ours"


@pytest.mark.parametrize("kind", [kind for kind in TODAY if kind.startswith("deepseek")])
def test_weights_come_back_bit_for_bit(tmp_path, kind):
    there, back = (
        {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for folder in exported(random_model(TODAY[kind]()).float(), tmp_path)
    )
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)


def test_a_model_of_dense_layers_only(tmp_path):
    config = transformers.DeepseekV3Config(**COMMON | LATENT | {"first_k_dense_replace": 2}, n_group=1, topk_group=1)
    assert from_huggingface(config).config.num_moe_experts is None
    _, back = exported(random_model(config).float(), tmp_path)
    assert json.loads((back / "config.json").read_text())["first_k_dense_replace"] == 2


def test_parts_that_predict_further_tokens_are_told_and_left_out(tmp_path):
    """DeepSeek-V3's layer 61: what transformers ignores, an import names."""
    theirs = random_model(TODAY["deepseek_v3"]()).float()
    theirs.save_pretrained(tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(file)
    last = {name: weight.clone() for name, weight in weights.items() if "layers.3." in name}
    further = {name.replace("layers.3.", "layers.4."): weight for name, weight in last.items()}
    further |= {"model.layers.4.eh_proj.weight": torch.ones(32, 64), "model.layers.4.enorm.weight": torch.ones(32)}
    save_file(weights | further, file)
    model = GPTModel(**from_huggingface(tmp_path / "hf").arguments(), parallel=ParallelState.single("cpu")).eval()
    with pytest.warns(UserWarning, match="1 parts of the Hugging Face weights predict tokens after the next one"):
        load_huggingface(model, tmp_path / "hf")
    tokens = torch.randint(101, (2, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    save_file({**weights, "model.layers.4.mlp.up_proj.weight": torch.ones(48, 32)}, file)
    with pytest.raises(
        ValueError, match=r"1 of the Hugging Face weights have no place in the model: model\.layers\.4"
    ):
        load_huggingface(model, tmp_path / "hf")


RUN = """device = "cpu"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
ffn_hidden_size = 48
layernorm_epsilon = 1e-6
multi_latent_attention = true
q_lora_rank = 12
kv_lora_rank = 10
qk_head_dim = 6
qk_pos_emb_head_dim = 4
v_head_dim = 5
qk_layernorm = true
rotary_scaling = {{ kind = "yarn", factor = 8.0, original_max_position_embeddings = 8, mscale_all_dim = 1.0 }}
num_moe_experts = 4
moe_layer_freq = [0, 1]
moe_ffn_hidden_size = 16
moe_shared_expert_intermediate_size = 16
moe_router_score_function = "sigmoid"
moe_router_num_groups = 2
moe_router_group_topk = 1
moe_router_enable_expert_bias = true
[data]
sequence_length = 16
train = "{train}"
valid = "{valid}"
tokenizer = "{tokenizer}"
[training]
train_steps = 3
global_batch_size = 4
micro_batch_size = 2
output = "{output}"
[checkpoint]
directory = "{output}/steps"
export_huggingface = "{output}/hf"
"""


def written(tmp_path):
    made = prepared(tmp_path)
    paths = {name: str(getattr(made, name)) for name in ("train", "valid", "tokenizer")}
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(**paths, output=tmp_path / "out"))
    return path


def losses(path, *flags):
    nowhere = ["--checkpoint.directory=None", "--checkpoint.export-huggingface=None"]
    run = load_run(["--config", str(path), *nowhere, *flags]).run
    model, _, _, loader = initialize(config=run)
    found = [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    return found


def test_a_run_from_a_file_on_any_layout_and_its_model_in_transformers(ranks, tmp_path):
    path = written(tmp_path)
    pretrain(["--config", str(path)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM" and theirs.config.rope_interleave is False
    alone = losses(path)
    assert alone[-1] < alone[0]
    split = ["--parallel.tensor=2", "--parallel.sequence-parallel", "--parallel.expert=2"]
    for found in ranks(losses, path, *split, world=2):
        assert found == pytest.approx(alone, abs=2e-5)
