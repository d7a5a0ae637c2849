"""TP=2 over gloo: our plain tensors against torch's parallelize_module + loss_parallel with its best plan.

    OMP_NUM_THREADS=1 python -m benchmarks.tensor_parallel [--quick] [--json FILE]

Starts two ranks by itself. Same weights, microbatches, threads and fused AdamW on both sides; the losses must
agree. Beside our step its bound: its own matmul and attention kernels and its messages, bare. Also counts the Python
function calls of one step (forward, backward, optimizer; one microbatch) of each.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.bound import bound_of
from benchmarks.harness import (
    alternating,
    arguments,
    compare_pairs,
    count_calls,
    fused_adamw,
    report,
    take_turns,
    total,
)
from benchmarks.llama import Llama, Shape, huggingface_names, tensor_parallel
from core.models.gpt import GPTModel, llama_spec
from core.models.huggingface import load_huggingface
from core.parallel_state import ParallelConfig, ParallelState
from core.transformer.transformer_config import TransformerConfig


def our_model(shape, dtype, *, sequence=False, weights=None):
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
    )
    ps = ParallelState.build(
        ParallelConfig(tensor=dist.get_world_size(), sequence_parallel=sequence), device="cpu"
    )
    model = GPTModel(config, llama_spec(), shape.vocab, shape.seq, parallel=ps)
    if weights is not None:
        load_huggingface(model, weights)
    return model


def stepper(microbatches, loss_fn, optimizer):
    def step():
        total = 0.0
        for tokens, labels in microbatches:
            loss = loss_fn(tokens, labels) / len(microbatches)
            loss.backward()
            total += (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def compare(shape, batch, microbatches, dtype, pairs):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(0)
    plain = Llama(shape).to(dtype)
    ours = our_model(shape, dtype, weights=huggingface_names(plain.state_dict()))
    theirs = tensor_parallel(
        plain, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    )
    data = torch.randint(
        shape.vocab, (batch, shape.seq + 1), generator=torch.Generator().manual_seed(1)
    )
    parts = [(d[:, :-1].contiguous(), d[:, 1:].contiguous()) for d in data.chunk(microbatches)]

    def their_loss(tokens, labels):
        return F.cross_entropy(theirs(tokens).float().flatten(0, 1), labels.flatten())

    def our_loss(tokens, labels):
        return ours(tokens, labels=labels).mean()

    peer_step, our_step = (
        stepper(parts, their_loss, fused_adamw(theirs)),
        stepper(parts, our_loss, fused_adamw(ours)),
    )

    def peer():
        with loss_parallel():
            return peer_step()

    difference = abs(peer() - our_step())
    assert difference < (1e-4 if dtype == torch.float32 else 3e-2), (
        f"the losses differ by {difference}"
    )
    ratio = take_turns(our_step, peer, pairs=pairs, before=dist.barrier)
    sides = {"step": our_step, "bound": bound_of(our_step, ours.parallel.group("tp"))}
    return ratio, alternating(sides, pairs, total, dist.barrier)


def counted_step(model, loss_fn):
    """(forward, backward, optimizer step) of one microbatch."""
    optimizer = fused_adamw(model)

    def step():
        loss_fn().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def python_calls(shape, *, sequence):
    """Python function calls of one of our steps."""
    model = our_model(shape, torch.float32, sequence=sequence)
    tokens = torch.randint(shape.vocab, (4, shape.seq), generator=torch.Generator().manual_seed(1))
    return count_calls(counted_step(model, lambda: model(tokens, labels=tokens.roll(-1, 1)).mean()))


def peer_python_calls(shape, *, sequence):
    """Python function calls of one of torch's steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tensor_parallel(Llama(shape), mesh, sequence=sequence)
    tokens = torch.randint(shape.vocab, (4, shape.seq), generator=torch.Generator().manual_seed(1))
    with loss_parallel():
        return count_calls(
            counted_step(
                model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            )
        )


def work(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    small = Shape(hidden=128, layers=2, heads=4, kv_heads=4, ffn=352, seq=64, vocab=1024)
    shape, batch, microbatches = (small, 4, 2) if args.quick else (Shape(), 8, 4)
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(
        f"{shape}, {batch * shape.seq} tokens in {microbatches} microbatches, 2 gloo ranks, fused AdamW, eager"
    )
    result = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if name not in args.dtypes:
            continue
        ratio, over = compare(shape, batch, microbatches, dtype, pairs=5 if args.quick else 11)
        say(ratio.row(f"{name}: ours against torch tensor parallel"))
        result[f"speedup_vs_torch_tp_{name}"] = ratio.median
        compare_pairs(result, f"over_bound_tp2_{name}", over, "step", "bound", say)
    counted = Shape(hidden=256, layers=4, heads=8, kv_heads=4, ffn=704, seq=128, vocab=2048)
    for key, sequence in (("python_calls", False), ("python_calls_sp", True)):
        result[key] = python_calls(counted, sequence=sequence)
        say(f"{key}: {result[key]} (torch's: {peer_python_calls(counted, sequence=sequence)})")
    if dist.get_rank() == 0:
        report(result, args.json)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args)
        return
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    raise SystemExit(
        subprocess.call([*launcher, "-m", "benchmarks.tensor_parallel", *sys.argv[1:]])
    )


if __name__ == "__main__":
    main()
