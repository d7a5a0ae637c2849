"""One training step in one process: our GPTModel against Hugging Face's LlamaForCausalLM, both eager, and our layers
compiled (inductor, a C++ compiler is needed) against ours eager and against theirs compiled.

    OMP_NUM_THREADS=1 python -m benchmarks.dense_step [--quick] [--json FILE]

Same weights, tokens, threads and fused AdamW on both sides; the losses must agree. bf16 is pure on both sides
(parameters, gradients, states); a further row shows ours with float32 main parameters and main gradients,
which the peer does not have.
"""

import statistics

import torch
import torch.nn.functional as F
import transformers

from benchmarks.harness import (
    arguments,
    flops_per_token,
    fused_adamw,
    kernel_seconds,
    matmul_flops,
    report,
    take_turns,
)
from benchmarks.llama import Shape
from core.autograd.compiled import compile_layers
from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface, load_huggingface
from core.parallel_state import ParallelState


def huggingface(shape, dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def our_model(theirs, dtype):
    model = GPTModel(
        **from_huggingface(theirs.config, params_dtype=dtype).arguments(),
        parallel=ParallelState.single("cpu"),
    )
    load_huggingface(model, theirs.state_dict())
    return model


def stepper(loss_fn, optimizer):
    def step():
        loss = loss_fn()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def with_main_parameters(model, tokens, labels):
    """Our step with float32 main parameters and main gradients."""
    from core.data_parallel import DataParallel
    from core.optimizer import OptimizerConfig, ShardedAdamW

    shard = DataParallel(model, ParallelState.single("cpu"))
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=3e-4, weight_decay=0.01, clip_grad=0.0))

    def step():
        loss = model(tokens, labels=labels).sum()
        loss.backward()
        optimizer.step(num_tokens=labels.numel())
        optimizer.zero_grad()

    return step


def compare(shape, batch, dtype, pairs):
    theirs = huggingface(shape, dtype)
    ours = our_model(theirs, dtype)
    data = torch.randint(
        shape.vocab, (batch, shape.seq + 1), generator=torch.Generator().manual_seed(1)
    )
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()

    def their_loss():
        return F.cross_entropy(theirs(tokens).logits.float().flatten(0, 1), labels.flatten())

    def our_loss():
        return ours(tokens, labels=labels).mean()

    difference = abs(their_loss().item() - our_loss().item())
    assert difference < (1e-5 if dtype == torch.float32 else 2e-2), (
        f"the losses differ by {difference}"
    )
    a, b = stepper(our_loss, fused_adamw(ours)), stepper(their_loss, fused_adamw(theirs))
    ratio = take_turns(a, b, pairs=pairs)
    main = None
    if dtype == torch.bfloat16:
        main = take_turns(
            with_main_parameters(our_model(theirs, dtype), tokens, labels),
            b,
            pairs=max(5, pairs // 2),
        )
    compiled = our_model(theirs, dtype)
    compile_layers(compiled)
    compiled_step = stepper(lambda: compiled(tokens, labels=labels).mean(), fused_adamw(compiled))
    faster = take_turns(compiled_step, a, pairs=max(5, pairs // 2))
    their_compiled = huggingface(shape, dtype)
    their_forward = torch.compile(their_compiled)

    def their_compiled_loss():
        return F.cross_entropy(their_forward(tokens).logits.float().flatten(0, 1), labels.flatten())

    against_compiled = take_turns(
        compiled_step,
        stepper(their_compiled_loss, fused_adamw(their_compiled)),
        pairs=max(5, pairs // 2),
    )
    share = kernel_seconds(b) / statistics.median(ratio.peer)
    fraction = (
        flops_per_token(shape)
        * tokens.numel()
        / statistics.median(ratio.ours)
        / matmul_flops(dtype)
    )
    return ratio, main, faster, against_compiled, fraction, share


def main():
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = Shape(hidden=128, layers=2, heads=4, kv_heads=2, ffn=352, seq=64, vocab=1024)
    shape, batch = (small, 2) if args.quick else (Shape(kv_heads=4), 4)
    pairs, result = 5 if args.quick else 11, {}
    print(f"{shape}, {batch * shape.seq} tokens, 1 thread, fused AdamW, eager")
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if name not in args.dtypes:
            continue
        ratio, main_parameters, faster, against_compiled, fraction, share = compare(
            shape, batch, dtype, pairs
        )
        print(ratio.row(f"{name}: ours against Hugging Face"))
        if main_parameters:
            print(main_parameters.row(f"{name}: ours with fp32 main parameters"))
        print(faster.row(f"{name}: ours with compiled layers against ours eager"))
        print(against_compiled.row(f"{name}: both compiled"))
        print(f"{name}: ours runs at {fraction:.2f} of this machine's matmul rate")
        print(
            f"{name}: matmul and attention kernels are {share:.0%} of the peer's step: no ratio above {1 / share:.2f}"
        )
        result[f"speedup_vs_hf_{name}"] = ratio.median
        result[f"matmul_fraction_{name}"] = fraction
        result[f"compiled_vs_eager_{name}"] = faster.median
        result[f"speedup_vs_hf_compiled_{name}"] = against_compiled.median
    report(result, args.json)


if __name__ == "__main__":
    main()
