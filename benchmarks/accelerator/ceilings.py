"""What the device can do at best at the shapes of a step: products, attention, copies. Floors are made of these."""

from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.accelerator.bench import GPT_1B4, SMALL, TINY, Bench, NotHereError
from core.tensor_parallel import cross_entropy

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def size_of(b: Bench):
    return TINY if b.dry else SMALL if b.on_cpu else GPT_1B4


def products(b):
    """FLOP/s of a layer's largest product, forward, dx and dW, in bf16."""
    size = size_of(b)
    tokens, fan_in, fan_out = size.tokens, size.hidden, 2 * size.ffn
    x = torch.randn(tokens, fan_in, device=b.device, dtype=torch.bfloat16)
    w = torch.randn(fan_out, fan_in, device=b.device, dtype=torch.bfloat16)
    gy = torch.randn(tokens, fan_out, device=b.device, dtype=torch.bfloat16)
    flops = 2 * tokens * fan_in * fan_out
    rates = {
        "forward": flops / b.seconds(lambda: x @ w.t()),
        "dx": flops / b.seconds(lambda: gy @ w),
        "dw": flops / b.seconds(lambda: gy.t() @ x),
    }
    b.figures |= {f"tflops_{name}": rate / 1e12 for name, rate in rates.items()}
    b.figures["tflops_products"] = 3 / sum(1 / rate for rate in rates.values()) / 1e12
    return (
        f"{b.figures['tflops_products']:.4g} TFLOP/s [{tokens}, {fan_in}] x [{fan_in}, {fan_out}]"
    )


def attention(b):
    """FLOP/s of causal attention, forward and backward, of each kernel that this device has."""
    size, told = size_of(b), []
    shape = (size.rows, size.heads, size.sequence, size.hidden // size.heads)
    q, k, v = (
        torch.randn(shape, device=b.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gy = torch.randn_like(q)
    flops = 12 * size.rows * size.sequence**2 * size.hidden / 2

    def both_ways():
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gy)
        q.grad = k.grad = v.grad = None

    for name, kernel in KERNELS.items():
        try:
            with sdpa_kernel([kernel]):
                rate = flops / b.seconds(both_ways)
        except RuntimeError:
            continue
        b.figures[f"tflops_attention_{name}"] = rate / 1e12
        told.append(f"{name} {rate / 1e12:.4g}")
    b.figures["tflops_attention"] = flops / b.seconds(both_ways) / 1e12
    return f"{', '.join(told)}; as torch chooses {b.figures['tflops_attention']:.4g} TFLOP/s"


def bandwidth(b):
    """Bytes per second of a copy on the device, read and written."""
    n = 2**20 if b.dry else 2**28
    x = torch.empty(n, dtype=torch.float32, device=b.device)
    y = torch.empty_like(x)
    b.figures["gb_s_copy"] = 2 * x.nbytes / b.seconds(lambda: y.copy_(x)) / 1e9
    return f"{b.figures['gb_s_copy']:.0f} GB/s"


def to_host(b):
    """Bytes per second from the device to pinned memory, which a save needs."""
    if b.on_cpu:
        raise NotHereError("the CPU's memory is the host's")
    n = 2**20 if b.dry else 2**28
    x = torch.empty(n, dtype=torch.uint8, device=b.device)
    pinned = torch.empty(n, dtype=torch.uint8, pin_memory=True)
    b.figures["gb_s_to_host"] = n / b.seconds(lambda: pinned.copy_(x, non_blocking=True)) / 1e9
    return f"{b.figures['gb_s_to_host']:.1f} GB/s"


def loss_chunks(b):
    """Seconds of the cross entropy both ways, for each number of logits that it takes at a time."""
    size, told = size_of(b), {}
    logits = torch.randn(
        size.tokens, size.vocab, device=b.device, dtype=torch.bfloat16, requires_grad=True
    )
    labels = torch.randint(size.vocab, (size.tokens,), device=b.device)

    def both_ways():
        cross_entropy.vocab_parallel_cross_entropy(logits, labels).sum().backward()
        logits.grad = None

    for power in (10, 12) if b.dry else (23, 24, 25, 26, 27):
        with patch.multiple(cross_entropy, _DEVICE_CHUNK=1 << power, _CPU_CHUNK=1 << power):
            told[power] = b.figures[f"ms_loss_chunk_2^{power}"] = b.seconds(both_ways) * 1e3
    return ", ".join(f"2^{power} {ms:.3g} ms" for power, ms in told.items())


def run(b: Bench):
    """All of them."""
    for name, measure in (
        ("products", products),
        ("attention", attention),
        ("copies on the device", bandwidth),
        ("copies to the host", to_host),
        ("chunks of the loss", loss_chunks),
    ):
        b.line(f"ceiling: {name}", measure)
