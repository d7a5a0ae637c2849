"""One training step in bf16 with float32 main weights, beside its peers: Hugging Face eager and compiled, a plain
module compiled. Sides take turns; losses must agree; then a profile of ours by kernel class, beside the floor."""

import gc
import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.accelerator.bench import (
    GPT_1B4,
    GPT_3B6,
    SMALL,
    TINY,
    Bench,
    NotHereError,
    Trained,
    batch,
    compile_for,
    gpt,
)
from benchmarks.accelerator.ceilings import attention, bandwidth, products
from benchmarks.llama import Llama, Shape
from core.training.log.metrics import peak_flops

SIZES = {"small": SMALL, "1.4b": GPT_1B4, "3.6b": GPT_3B6}
CLASSES = {
    "products": (
        "gemm",
        "nvjet",
        "cutlass",
        "matmul",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "mkldnn",
    ),
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "embedding and loss": ("embedding", "softmax", "nll", "index", "gather"),
}


class Side:
    """One engine: `step()` makes one update and returns its loss as a tensor."""

    def __init__(self, name, step):
        self.name, self.step, self.times = name, step, []


def ours(size, b, *, compiled):
    job = Trained(gpt(size, torch.bfloat16, b.state()), b.state(), weight_decay=0.01, lr=1e-4)
    if compiled:
        compile_for(b, job.model)
    rows = batch(size, b.device)
    return lambda: job.step(rows)[0]


def peer(model, logits_of, size, b, *, compiled):
    """A peer with fused AdamW over bf16 weights and states, clipped as ours; compiled whole, with its loss."""
    rows = batch(size, b.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def loss_of(tokens, labels):
        return F.cross_entropy(logits_of(tokens).flatten(0, 1).float(), labels.flatten())

    if compiled:
        loss_of = torch.compile(loss_of, backend="eager" if b.dry else "inductor")

    def step():
        loss = loss_of(rows["tokens"], rows["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def huggingface(size, b, *, compiled):
    try:
        import transformers
    except ImportError:
        raise NotHereError("transformers is not installed") from None
    config = transformers.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=size.sequence,
        use_cache=False,
    )
    with torch.device(b.device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return peer(model, lambda tokens: model(tokens).logits, size, b, compiled=compiled)


def plain(size, b, *, compiled):
    shape = Shape(
        size.hidden, size.layers, size.heads, size.groups, size.ffn, size.sequence, size.vocab
    )
    with torch.device(b.device):
        model = Llama(shape).to(torch.bfloat16)
    return peer(model, model, size, b, compiled=compiled)


SIDES = {
    "ours_eager": (ours, False),
    "ours_compiled": (ours, True),
    "hf_eager": (huggingface, False),
    "hf_compiled": (huggingface, True),
    "plain_compiled": (plain, True),
}


def sides_of(size, b):
    """Those that can be built and make a step; a line each."""
    sides = []
    for name, (build, compiled) in SIDES.items():

        def make(b, name=name, build=build, compiled=compiled):
            step = build(size, b, compiled=compiled)
            loss = float(step())
            step()  # what is compiled for the second step only
            sides.append((Side(name, step), loss))
            return f"first loss {loss:.3f}"

        b.line(f"step: build {name}", make)
    return sides


def race(size, sides, b):
    """Rounds A B C, C B A, ... (dry: 1 of 2 steps) after warm ones; median tokens/s of each side."""
    rounds, steps, warm = (1, 2, 1) if b.dry else (b.rounds, b.steps, b.warm)
    first = sides[0][1]
    for side, loss in sides:
        assert abs(loss - first) < 0.5, (
            f"{side.name} begins with a loss of {loss}, {sides[0][0].name} with {first}"
        )
        for _ in range(warm):
            side.step()
    for number in range(rounds):
        for side, _ in sides if number % 2 == 0 else sides[::-1]:
            start = b.mark()
            for _ in range(steps):
                side.step()
            side.times.append(b.between(start, b.mark()) / steps)
    peak = peak_flops(b.device, torch.bfloat16)
    for side, _ in sides:
        seconds = statistics.median(side.times)
        causal, unmasked = (sum(size.flops(causal=kind)) / seconds / peak for kind in (True, False))
        b.figures |= {
            f"tokens_s_{side.name}": size.tokens / seconds,
            f"mfu_causal_{side.name}": causal,
            f"mfu_unmasked_{side.name}": unmasked,
        }
        print(
            f"  {side.name:16s} {seconds * 1e3:9.1f} ms  {size.tokens / seconds:10.0f} tokens/s  "
            f"MFU {causal:.1%} causal, {unmasked:.1%} unmasked  ({min(side.times) * 1e3:.1f} .. "
            f"{max(side.times) * 1e3:.1f} ms)"
        )
    for mine, theirs in (
        ("compiled", "hf_compiled"),
        ("eager", "hf_eager"),
        ("compiled", "plain_compiled"),
    ):
        a, c = b.figures.get(f"tokens_s_ours_{mine}"), b.figures.get(f"tokens_s_{theirs}")
        if a and c:
            b.figures[f"ours_{mine}_vs_{theirs}"] = a / c


def beside_the_floor(size, step, b):
    """Where a step's device time goes, beside what the ceilings allow."""
    for measure in (products, attention, bandwidth):
        measure(b)
    in_products, in_attention = size.flops(causal=True)
    floor = {
        "products": in_products / b.figures["tflops_products"] / 1e12,
        "attention": in_attention / b.figures["tflops_attention"] / 1e12,
        "optimizer": 30 * size.parameters() / b.figures["gb_s_copy"] / 1e9,
    }
    activities = [torch.profiler.ProfilerActivity.CPU]
    if b.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        b.sync()
    seconds = dict.fromkeys((*CLASSES, "the rest"), 0.0)
    for event in profile.key_averages():
        time_us = event.self_cpu_time_total if b.on_cpu else event.self_device_time_total
        name = event.key.lower()
        kind = next(
            (kind for kind, words in CLASSES.items() if any(word in name for word in words)),
            "the rest",
        )
        seconds[kind] += time_us / 1e6
    total = sum(seconds.values())
    for kind, spent in seconds.items():
        print(
            f"  {kind:20s} {spent * 1e3:9.2f} ms  {spent / total:6.1%}  floor {floor.get(kind, 0) * 1e3:9.2f} ms"
        )
    b.figures["floor_s"] = sum(floor.values())
    return f"floor {b.figures['floor_s'] * 1e3:.1f} ms, kernels {total * 1e3:.1f} ms"


def host_time(side, b):
    """Seconds the host needs to ask for a step, over the seconds the device needs for it."""
    if b.on_cpu:
        raise NotHereError("the host computes the step itself")
    b.sync()
    start, begin = b.mark(), time.perf_counter()
    side.step()
    host = time.perf_counter() - begin
    ratio = host / b.between(start, b.mark())
    b.figures[f"host_over_device_{side.name}"] = ratio
    return f"{ratio:.2f}"


def run(b: Bench):
    """All sides, then the profile of our best one."""
    size = TINY if b.dry else SIZES[getattr(b, "model", "1.4b")]
    print(f"  {size}: {size.parameters():,} parameters, {size.tokens:,} tokens a step")
    sides = sides_of(size, b)
    assert sides, "no side could be built"
    b.line("step: sides in turns", lambda b: race(size, sides, b))
    for own in [side for side, _ in sides if side.name.startswith("ours")]:
        b.line(
            f"step: kernels of {own.name}", lambda b, own=own: beside_the_floor(size, own.step, b)
        )
        b.line(f"step: host over device of {own.name}", lambda b, own=own: host_time(own, b))
    sides.clear()
    gc.collect()
