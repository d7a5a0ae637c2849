"""Against an oracle nobody here wrote: Hugging Face transformers, random weights, offline, in float64."""

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from core.models.gpt import GPTModel
from core.models.huggingface import canonical, from_huggingface, load_huggingface
from tests.parity.whole import assert_same, whole_gradients
from tests.states import state

COMMON = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 101, "use_cache": False}
COMMON |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 8, "vocab_size": 101, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama-tied": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama-biased": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=12),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
}


def in_float64(monkeypatch):
    """Their RMSNorm and rotary tables compute in float32 whatever the dtype; here in float64."""

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        d, base = 2 * len(self.inv_freq), self.config.rope_parameters["rope_theta"]
        angle = position_ids[..., None].double() * base ** -(torch.arange(0, d, 2).double() / d)
        return torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

    for module, kind in ((modeling_llama, "Llama"), (modeling_qwen3, "Qwen3"), (modeling_qwen2, "Qwen2")):
        monkeypatch.setattr(getattr(module, f"{kind}RMSNorm"), "forward", norm)
        monkeypatch.setattr(getattr(module, f"{kind}RotaryEmbedding"), "forward", rotary)


def compare(kind, tp, sp, exact, padded):
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="sdpa").double()
    for p in theirs.parameters():  # biases start at zero and norms at one: make every number matter
        torch.nn.init.normal_(p, std=0.2, mean=float(p.dim() == 1))
    tokens = torch.randint(101, (2, 16))
    mask = torch.ones(2, 16, dtype=torch.long)
    if padded:
        mask[1, 11:] = 0
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            in_float64(patch)
        want = theirs(tokens, attention_mask=mask).logits
        (want.sin() * mask[..., None]).sum().backward()

    ps = state(tp=tp, sp=sp)
    model = GPTModel(**from_huggingface(theirs.config, params_dtype=torch.float64).arguments(), parallel=ps)
    load_huggingface(model, theirs.state_dict())
    causal = torch.ones(16, 16, dtype=torch.bool).triu(1)
    masked = (causal | (mask == 0)[:, None, None, :]) if padded else None
    got = model.gather_logits(model(tokens, None, masked))
    (got.sin() * mask[..., None]).sum().backward()
    tolerance = 1e-10 if exact else 1e-5
    keep = mask.bool()
    assert_same({"logits": got[keep]}, {"logits": want[keep]}, tolerance)
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    assert_same(whole_gradients(model, ps), canonical(gradients, model.config), tolerance)


@pytest.mark.parametrize("exact", [True, False], ids=["float64", "untouched"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_logits_and_gradients_equal_transformers(ranks, kind, tp, exact):
    ranks(compare, kind, tp, False, exact, False, world=tp)


@pytest.mark.parametrize("kind", CONFIGS)
def test_with_sequence_parallelism_and_a_padding_mask(ranks, kind):
    ranks(compare, kind, 2, True, True, True, world=2)
