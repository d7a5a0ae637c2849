"""Long sequences: attention over two ranks beside torch's ring, documents, kept attention, the loss in chunks.

    python -m benchmarks.context_parallel [--quick] [--json FILE]

CPU seconds of all ranks (getrusage): on a shared machine waiting says little. torch's own context parallelism refuses
CPUs; its ring template runs when it is handed the CPU kernel, which is the peer here.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from core.autograd import Comm, StageContext, apply_recompute
from core.context_parallel import Exchange, begin_of_rows, context_attention, visible_mask
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.models.gpt.head_loss import head_loss
from core.parallel_state import ContextRows, ParallelConfig, ParallelState
from core.tensor_parallel import vocab_parallel_cross_entropy
from core.testing.live import LiveBytes


def cpu():
    """CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def alternating(sides, pairs, total=lambda seconds: seconds, before=lambda: None):
    """name -> median CPU seconds of calls that take turns, after one of each."""
    times = {name: [] for name in sides}
    for turn in range(pairs + 1):
        for name in sides if turn % 2 else reversed(sides):
            before()
            start = cpu()
            sides[name]()
            seconds = total(cpu() - start)
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def backward(attend, q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attend(*leaves).backward(grad)


def heads(s, dtype, a=4, g=4, d=64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, s, d, generator=generator).to(dtype) for n in (a, g, g, a)]


def torch_ring(ring, kernel, kernel_backward):
    """torch's ring template with the CPU kernel, on the default group."""

    def forward(query, key, value, is_causal, **how):
        return kernel(query, key, value, 0.0, bool(is_causal))

    def back(query, key, value, out, logsumexp, is_causal, grad_out, **how):
        return kernel_backward(grad_out, query, key, value, out, logsumexp, 0.0, bool(is_causal))

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, logsumexp = ring._templated_ring_attention(dist.group.WORLD, 2, forward, q, k, v, is_causal=True)[:2]
            ctx.save_for_backward(q, k, v, out, logsumexp)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, logsumexp = ctx.saved_tensors
            return ring._templated_ring_attention_backward(
                dist.group.WORLD, 2, back, grad.contiguous(), "grad_out", q, k, v, out, logsumexp, True
            )[:3]

    return Ring.apply


def attention_rank(rank, world, store, s, pairs, result):
    """One rank of the attention benchmark; rank 0 writes the medians."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    states = {
        kind: ParallelState.build(ParallelConfig(context=world, cp_comm_type=kind), device="cpu")
        for kind in ("all_gather", "p2p", "a2a")
    }
    aten = torch.ops.aten
    theirs = torch_ring(
        ring,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )

    def total(seconds):
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value)
        return value.item()

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        sides = {}
        for kind, ps in states.items():
            rows, exchange = ContextRows.of_state(ps), Exchange(ps)
            mine = [rows.of(x, 2).contiguous() for x in heads(s, dtype)]
            sides[kind] = lambda mine=mine, exchange=exchange: backward(
                lambda q, k, v: context_attention(q, k, v, exchange, scale=q.shape[3] ** -0.5), *mine
            )
        zigzag = [ContextRows(world, rank).of(x, 2).contiguous() for x in heads(s, dtype)]
        for name, rotation in ring._RotateMethod.__members__.items():

            def peer(method=rotation, zigzag=zigzag):
                ring._cp_options.rotate_method = method
                backward(theirs, *zigzag)

            sides[f"torch {name.lower()}"] = peer
        found[str(dtype).removeprefix("torch.")] = alternating(sides, pairs, total, dist.barrier)
    if rank == 0:
        with open(result, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def attention(quick, found):
    with tempfile.TemporaryDirectory() as directory:
        result = os.path.join(directory, "result")
        mp.spawn(attention_rank, (2, os.path.join(directory, "store"), 1024 if quick else 4096, 5, result), nprocs=2)
        with open(result) as file:
            medians = json.load(file)
    for dtype, times in medians.items():
        for name, seconds in times.items():
            print(f"attention over 2 ranks, {dtype:9s} {name:18s} {seconds * 1e3:8.1f} CPU ms")
        short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        fastest = min(v for n, v in times.items() if n.startswith("torch"))
        found[f"attention_vs_torch_ring_{short}"] = fastest / min(
            v for n, v in times.items() if not n.startswith("torch")
        )


def documents(quick, found):
    s = 1024 if quick else 4096
    begin = torch.arange(s)[None] // (s // 8) * (s // 8)
    ps, tensors = ParallelState.single("cpu"), heads(s, torch.float32)
    exchange, mask = Exchange(ps), ~visible_mask(begin)
    sides = {
        "ours": lambda: backward(
            lambda q, k, v: context_attention(
                q, k, v, exchange, documents=begin_of_rows(begin, ps), scale=q.shape[3] ** -0.5
            ),
            *tensors,
        ),
        "mask": lambda: backward(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *tensors),
    }
    times = alternating(sides, 5)
    print(f"8 documents in {s}: strips {times['ours'] * 1e3:.1f}, bool mask {times['mask'] * 1e3:.1f} CPU ms")
    found["documents_vs_bool_mask"] = times["mask"] / times["ours"]


def recompute(quick, found):
    s = 1024 if quick else 4096
    config = llama_config(
        num_layers=4, hidden_size=256, num_attention_heads=4, ffn_hidden_size=704, params_dtype=torch.bfloat16
    )
    tokens = torch.randint(512, (1, s))
    sides = {}
    for name, policy, keeps in (
        ("none", "none", "nothing"),
        ("keeps", "layer", "attention"),
        ("all", "layer", "nothing"),
    ):
        model = GPTModel(config, llama_spec(), 512, s, parallel=ParallelState.single("cpu"), seed=1)
        apply_recompute(model, policy, stage=model.stage, keeps=keeps)
        sides[name] = lambda model=model: model(tokens, labels=tokens.roll(-1, 1)).sum().backward()
    times = alternating(sides, 3)
    print(f"forward and backward, s {s}, bf16: {', '.join(f'{n} {v * 1e3:.0f}' for n, v in times.items())} CPU ms")
    found["recompute_layer_overhead"] = times["keeps"] / times["none"]
    found["recompute_layer_overhead_keeps_nothing"] = times["all"] / times["none"]


def head(quick, found):
    n, h, v, chunk = (512, 256, 8192, 64) if quick else (4096, 256, 32768, 256)
    x = torch.randn(n, 1, h).requires_grad_()
    weight, labels = torch.nn.Parameter(torch.randn(v, h) / 16), torch.randint(v, (n, 1))
    how = {"stage": StageContext(), "comm": Comm(), "group": None, "vocab_size": v, "chunk": chunk}

    def whole():
        vocab_parallel_cross_entropy(F.linear(x, weight), labels, inplace=True).sum().backward()

    def chunked():
        head_loss(x, weight, labels, **how).sum().backward()

    def theirs():
        options = torch.nn.LinearCrossEntropyOptions()
        F.linear_cross_entropy(x[:, 0], weight, labels[:, 0], reduction="none", options=options).sum().backward()

    sides = {"whole": whole, "ours": chunked}
    if hasattr(F, "linear_cross_entropy"):
        sides["torch"] = theirs
    peaks = {}
    for name in ("whole", "ours"):
        x.grad = weight.grad = None
        with LiveBytes(x, weight, labels) as live:
            sides[name]()
        peaks[name] = live.peak
    times = alternating(sides, 3)
    print(f"head and loss, {n} tokens of {v}: {', '.join(f'{k} {t * 1e3:.0f}' for k, t in times.items())} CPU ms")
    found["head_loss_peak"] = peaks["ours"] / peaks["whole"]
    found["head_loss_time"] = times["ours"] / times["whole"]
    if "torch" in times:
        found["head_loss_vs_torch"] = times["torch"] / times["ours"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for part in (documents, head, recompute, attention):
        part(options.quick, found)
    text = json.dumps({name: round(value, 3) for name, value in found.items()})
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
