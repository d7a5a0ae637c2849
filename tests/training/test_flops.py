"""The model's FLOPs against torch's own count, and the peak they are held against."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from core.models.gpt import GPTModel
from core.parallel_state import ParallelState
from core.training.config import ModelConfig
from core.training.log import metrics
from core.training.log.metrics import PEAK_FLOPS, flops_per_token, peak_flops, total_peak_flops
from core.transformer.flops import multiplications_per_token
from core.transformer.transformer_config import TransformerConfig

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "ffn_hidden_size": 80}
SHAPES = {
    "gpt2": ModelConfig(style="gpt2", **SIZES),
    "llama": ModelConfig(**SIZES),
    "gqa": ModelConfig(**SIZES, num_query_groups=2),
    "mqa": ModelConfig(**SIZES, num_query_groups=1),
    "untied": ModelConfig(**SIZES, tie_embeddings=False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_torchs_own_with_half_of_the_attention(name):
    """torch counts the whole square of the attention where the plain kernel is asked for (the CPU's flash kernel it
    counts for nothing); causal attention needs half of it, and that half is what we state. All else is exact."""
    s, b, vocab, shape = 24, 2, 128, SHAPES[name]  # a vocabulary without padded rows
    config = shape.transformer()
    model = GPTModel(
        config,
        shape.spec(),
        vocab,
        s,
        parallel=ParallelState.single("cpu"),
        share_embeddings_and_output_weights=shape.tied,
    )
    tokens = torch.randint(vocab, (b, s))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens.roll(-1, 1)).sum().backward()
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    assert attention == 3 * config.num_layers * 4 * s * s * b * config.hidden_size
    assert flops_per_token(config, vocab, s) * s * b == counter.get_total_flops() - attention // 2


def test_half_of_a_long_sequence_is_seen():
    """At 24 positions the attention is 5 % of all: at 2048 it is most of it, and the half must still be right."""
    config = SHAPES["llama"].transformer()
    longer = flops_per_token(config, 128, 2048) - flops_per_token(config, 128, 1024)
    assert longer == 3 * config.num_layers * 4 * 1024 * config.hidden_size // 2


def test_a_given_peak_goes_first():
    assert peak_flops(CPU, torch.float32, 989) == 989e12
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"peak_tflops={wrong} must be above 0"):
            peak_flops(CPU, torch.float32, wrong)


@pytest.mark.parametrize(
    "device, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA GB200", 2450),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_a_known_device_is_looked_up_at_16_bits(device, tflops, monkeypatch):
    monkeypatch.setattr(metrics, "device_name", lambda _: device)
    monkeypatch.setattr(metrics, "_measure_matmul", lambda *_: 1.0)
    gpu = torch.device("cuda", 0)
    assert peak_flops(gpu, torch.bfloat16) == peak_flops(gpu, torch.float16) == tflops * 1e12
    assert peak_flops(gpu, torch.float32) == 1.0, "TF32 or not: measured"
    monkeypatch.setattr(metrics, "device_name", lambda _: "Another One")
    assert peak_flops(gpu, torch.bfloat16) == 1.0


def test_no_name_hides_a_longer_one():
    names = list(PEAK_FLOPS)
    assert not [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a in b]


def test_the_peak_of_a_cpu_is_its_best_product(monkeypatch):
    times = iter([0.0, *(t for k in range(20) for t in (k, k + (0.5 if k == 3 else 0.7), k / 100 + 0.001))])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(times))
    assert peak_flops(CPU, torch.float32) == 2 * 512**3 / 0.5


def totals():
    ps = ParallelState.build(device="cpu")
    return total_peak_flops(ps, torch.float32, 1.0 + ps.rank)


def test_the_peak_of_all_ranks_is_their_sum(ranks):
    assert ranks(totals) == [3e12, 3e12]


def test_windows_are_counted_as_their_masks():
    """Keys that a query sees, summed over the mask: in two layers with windows and in one without."""
    s, facts = 64, {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    full, _ = multiplications_per_token(TransformerConfig(**facts), 10, s)
    windowed, _ = multiplications_per_token(TransformerConfig(**facts, windows=(8, None, 16)), 10, s)
    i, j = torch.arange(s)[:, None], torch.arange(s)
    masks = [(i >= j) & (i - j < window) for window in (8, s, 16)]
    # a causal kernel's half: the diagonal counts half, as in `full`
    seen = sum(float(mask.sum()) - s / 2 for mask in masks) / 3 / s
    assert (sum(full) - sum(windowed)) / 3 == pytest.approx(2 * 32 * (s / 2 - seen), rel=1e-3)


def test_of_experts_those_count_that_a_token_uses():
    facts = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "add_bias_linear": False,
    }
    dense, _ = multiplications_per_token(TransformerConfig(**facts), 10, 64)
    experts = {"num_moe_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 20}
    experts |= {"moe_shared_expert_intermediate_size": 12}
    mixed, _ = multiplications_per_token(TransformerConfig(**facts, **experts), 10, 64)
    assert mixed[1] - (dense[1] - 2 * 32 * 48) == 2 * 32 * (3 * 20 + 12) + 32 * 8
