"""Long sequences: attention over two ranks beside torch's ring, documents, kept attention, the loss in chunks, and
whole steps beside data parallelism.

    python -m benchmarks.context_parallel [--quick] [--parts ...] [--json FILE]

CPU seconds of all ranks (getrusage), with the time beside them: on a shared machine waiting says little. torch's own
context parallelism refuses CPUs; its ring template runs when it is handed the CPU kernel, which is the peer here.
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness import (
    DTYPES,
    alternating,
    compare_pairs,
    matmul_dtypes,
    median,
    on_ranks,
    run_parts,
    total,
)
from core.autograd import Comm, StageContext, apply_recompute
from core.context_parallel import Exchange, begin_of_rows, context_attention, visible_mask
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_config, llama_spec
from core.models.gpt.head_loss import head_loss
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ContextRows, ParallelConfig, ParallelState, context_batch
from core.pipeline import SingleStage
from core.tensor_parallel import vocab_parallel_cross_entropy
from core.testing.live import LiveBytes
from core.training import next_token_loss

PAIRS = 5


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
            out, logsumexp = ring._templated_ring_attention(
                dist.group.WORLD, 2, forward, q, k, v, is_causal=True
            )[:2]
            ctx.save_for_backward(q, k, v, out, logsumexp)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, logsumexp = ctx.saved_tensors
            return ring._templated_ring_attention_backward(
                dist.group.WORLD,
                2,
                back,
                grad.contiguous(),
                "grad_out",
                q,
                k,
                v,
                out,
                logsumexp,
                True,
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

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        sides = {}
        for kind, ps in states.items():
            rows, exchange = ContextRows.of_state(ps), Exchange(ps)
            mine = [rows.of(x, 2).contiguous() for x in heads(s, dtype)]
            sides[kind] = lambda mine=mine, exchange=exchange: backward(
                lambda q, k, v: context_attention(q, k, v, exchange, scale=q.shape[3] ** -0.5),
                *mine,
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
    for dtype, times in on_ranks(attention_rank, 2, 1024 if quick else 4096, PAIRS).items():
        for name in times:
            print(
                f"attention over 2 ranks, {dtype:9s} {name:18s} {median(times, name) * 1e3:8.1f} CPU ms"
            )
        fastest = [
            min(
                (n for n in times if n.startswith("torch") == theirs),
                key=lambda n: median(times, n),
            )
            for theirs in (True, False)
        ]
        short = next(name for name, known in DTYPES.items() if str(known).endswith(dtype))
        compare_pairs(found, f"attention_vs_torch_ring_{short}", times, *fastest)


def step_rank(rank, world, store, s, dtype, pairs, result):
    """One rank of a whole step: `world` sequences over as many data ranks, and over context ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    config = llama_config(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=704,
        params_dtype=dtype,
    )
    tokens = torch.randint(2048, (world, s), generator=torch.Generator().manual_seed(0))
    whole = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    layouts = {"dp": ParallelConfig()}
    layouts |= {
        kind: ParallelConfig(context=world, cp_comm_type=kind)
        for kind in ("all_gather", "p2p", "a2a")
    }
    sides, losses = {}, {}
    for name, layout in layouts.items():
        ps = ParallelState.build(layout, device="cpu")
        model = GPTModel(config, llama_spec(), 2048, s, parallel=ps, seed=1)
        shard = DataParallel(model, ps)
        optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-4))
        executor = SingleStage(model, ps=ps, grad_sync=shard)
        mine = (
            {key: value[rank : rank + 1] for key, value in whole.items()} if name == "dp" else whole
        )
        batch = context_batch(mine, ps)

        def step(name=name, executor=executor, optimizer=optimizer, batch=batch):
            stats = executor.step(batch, next_token_loss)
            optimizer.step(num_tokens=stats.num_tokens)
            optimizer.zero_grad()
            losses[name] = stats.loss.item()

        sides[name] = step

    tried = alternating(sides, 1, total, dist.barrier)
    assert max(losses.values()) - min(losses.values()) < 2e-2, f"the losses differ: {losses}"
    best = min(layouts.keys() - {"dp"}, key=lambda name: tried[name][0][0])
    choice = torch.tensor(list(layouts).index(best))
    dist.broadcast(choice, 0)
    best = list(layouts)[choice]
    times = alternating({"dp": sides["dp"], best: sides[best]}, pairs, total, dist.barrier)
    if rank == 0:
        with open(result, "w") as file:
            json.dump({"best": best, "times": times}, file)
    dist.destroy_process_group()


def steps(quick, found):
    for world, s in ((2, 512 if quick else 4096), (4, 1024 if quick else 8192)):
        for short, dtype in matmul_dtypes().items():
            told = on_ranks(step_rank, world, s, dtype, PAIRS)
            best, times = told["best"], told["times"]
            print(
                f"{world} sequences of {s}, {short}: over dp {median(times, 'dp') * 1e3:.0f}, over cp by {best} "
                f"{median(times, best) * 1e3:.0f} CPU ms a step"
            )
            compare_pairs(found, f"cp{world}_vs_dp{world}_{short}", times, best, "dp")


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
        "mask": lambda: backward(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *tensors
        ),
    }
    times = alternating(sides, PAIRS)
    print(
        f"8 documents in {s}: strips {median(times, 'ours') * 1e3:.1f}, mask {median(times, 'mask') * 1e3:.1f} CPU ms"
    )
    compare_pairs(found, "documents_vs_bool_mask", times, "mask", "ours")


def recompute(quick, found):
    s = 1024 if quick else 4096
    tokens = torch.randint(512, (1, s))
    for short, dtype in matmul_dtypes().items():
        config = llama_config(
            num_layers=4,
            hidden_size=256,
            num_attention_heads=4,
            ffn_hidden_size=704,
            params_dtype=dtype,
        )
        sides = {}
        for name, policy, keeps in (
            ("none", "none", "nothing"),
            ("keeps", "layer", "attention"),
            ("all", "layer", "nothing"),
        ):
            model = GPTModel(
                config, llama_spec(), 512, s, parallel=ParallelState.single("cpu"), seed=1
            )
            apply_recompute(model, policy, stage=model.stage, keeps=keeps)
            sides[name] = lambda model=model: (
                model(tokens, labels=tokens.roll(-1, 1)).sum().backward()
            )
        times = alternating(sides, PAIRS)
        each = ", ".join(f"{name} {median(times, name) * 1e3:.0f}" for name in times)
        print(f"forward and backward, s {s}, {short}: {each} CPU ms")
        compare_pairs(found, f"recompute_layer_overhead_{short}", times, "keeps", "none")
        compare_pairs(
            found, f"recompute_layer_overhead_keeps_nothing_{short}", times, "all", "none"
        )


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
        F.linear_cross_entropy(
            x[:, 0], weight, labels[:, 0], reduction="none", options=options
        ).sum().backward()

    sides = {"whole": whole, "ours": chunked}
    if hasattr(F, "linear_cross_entropy"):
        sides["torch"] = theirs
    peaks = {}
    for name in ("whole", "ours"):
        x.grad = weight.grad = None
        with LiveBytes(x, weight, labels) as live:
            sides[name]()
        peaks[name] = live.peak
    times = alternating(sides, PAIRS)
    print(
        f"head and loss, {n} tokens of {v}: {', '.join(f'{k} {median(times, k) * 1e3:.0f}' for k in times)} CPU ms"
    )
    found["head_loss_peak"] = peaks["ours"] / peaks["whole"]
    compare_pairs(found, "head_loss_time", times, "ours", "whole")
    if "torch" in times:
        compare_pairs(found, "head_loss_vs_torch", times, "torch", "ours")


if __name__ == "__main__":
    run_parts(__doc__, documents, head, recompute, attention, steps)
