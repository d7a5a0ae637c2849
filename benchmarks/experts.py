"""Experts: a Mixtral block in one process and over two ranks beside transformers' own, and whole steps of ours.

    python -m benchmarks.experts [--quick] [--parts ...] [--json FILE]

The peers are transformers' block, with its own expert parallelism (`AllToAllEP`) over two ranks, and the faster of
its two kinds of experts; and the MoE layers of Megatron-Core and DeepSpeed, each where it is installed
(`benchmarks.experts_peers`). Same weights, so the same routing; outputs and gradients of the inputs are compared
before anything is timed. CPU seconds of all ranks, with the time beside them.
"""

import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig
from transformers.distributed.expert_parallel import AllToAllEP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock

from benchmarks import experts_peers
from benchmarks.harness import (
    DTYPES,
    alternating,
    compare_pairs,
    count_calls,
    fused_adamw,
    matmul_dtypes,
    median,
    on_ranks,
    run_parts,
    total,
)
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, moe_spec
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelConfig, ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from core.transformer import TransformerConfig

PAIRS = 11
VOCAB, HIDDEN, FFN, EXPERTS, TOP_K = 2048, 256, 448, 8, 2
THEIR_EXPERTS = ("eager", "grouped_mm")
BLOCKS = {"megatron": experts_peers.MegatronBlock, "deepspeed": experts_peers.DeepSpeedBlock}


class Side:
    """Forward and backward of a block, `forward` of [s, 1, h]; gives its output and the gradient of its input."""

    def __init__(self, forward, x, gradient, inside=nullcontext):
        self.forward, self.x, self.gradient, self.inside = forward, x, gradient, inside

    def __call__(self):
        leaf = self.x.clone().requires_grad_()
        y = self.forward(leaf)
        y.backward(self.gradient)
        return y.detach(), leaf.grad


def our_model(ps, dtype, s, layers):
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
    )
    return GPTModel(config, moe_spec(), VOCAB, s, parallel=ps, seed=1)


def their_block(kind, dtype, state, experts):
    """Their block with the experts number `experts` (a slice) of `state`; over ranks it exchanges tokens."""
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = kind
    block = MixtralSparseMoeBlock(config)
    if experts.stop - experts.start < EXPERTS:
        config.num_local_experts = experts.stop - experts.start
        block.experts = MixtralExperts(config)
        block.experts._is_expert_parallel = True
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
        block.experts.forward = AllToAllEP(block.experts, mesh["ep"], mesh["tp"])
    block.to(dtype)
    with torch.no_grad():
        block.gate.weight.copy_(state["router"])
        block.experts.gate_up_proj.copy_(state["fc1"][experts].flatten(1, 2))
        block.experts.down_proj.copy_(state["fc2"][experts])
    return block


def own_gradients(experts):
    """Buffers for the experts' gradients: over ranks somebody must own them, though here nobody has to sum them."""
    for weight in experts.parameters():
        weight.main_grad = torch.zeros_like(weight)


def clearly_routed(candidates, router, count):
    """The `count` of them that are furthest from a tie: theirs makes logits in the model's dtype, ours in float32."""
    logits = (candidates.float() @ router.float().T).squeeze(1).sort(descending=True).values
    margins = logits[:, TOP_K - 1] - logits[:, TOP_K]
    return candidates[margins.topk(count).indices.sort().values]


def block_sides(ps, dtype, tokens, peers):
    """name -> forward and backward of the block on this rank's `tokens`; all with the same weights."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "router": (EXPERTS, HIDDEN),
        "fc1": (EXPERTS, 2, FFN, HIDDEN),
        "fc2": (EXPERTS, HIDDEN, FFN),
    }
    state = {
        name: (torch.randn(shape, generator=draw) * 0.05).to(dtype)
        for name, shape in shapes.items()
    }
    draw.manual_seed(1 + ps.rank)
    x = clearly_routed(
        torch.randn(4 * tokens, 1, HIDDEN, generator=draw).to(dtype), state["router"], tokens
    )
    gradient = torch.randn(tokens, 1, HIDDEN, generator=draw).to(dtype)
    held = EXPERTS // ps.size("ep")
    mine = slice(held * ps.index("ep"), held * ps.index("ep") + held)
    ours = our_model(ps, dtype, tokens, 1).decoder.layers[0].mlp
    with torch.no_grad():
        ours.router.weight.copy_(state["router"])
        ours.experts.linear_fc1.weight.copy_(state["fc1"][mine])
        ours.experts.linear_fc2.weight.copy_(state["fc2"][mine])
    own_gradients(ours.experts)
    sides = {"ours": Side(ours, x, gradient)}
    for kind in THEIR_EXPERTS:
        theirs = their_block(kind, dtype, state, mine)
        sides[kind] = Side(
            lambda x, block=theirs: block(x.transpose(0, 1)).transpose(0, 1), x, gradient
        )
    shape = {"hidden": HIDDEN, "ffn": FFN, "experts": EXPERTS, "top_k": TOP_K}
    for name in peers:
        peer = BLOCKS[name](shape, dtype, state, mine)
        sides[name] = Side(peer.forward, x, gradient, peer.inside)
    return sides


def assert_agree(sides, dtype):
    found = {}
    for name, side in sides.items():
        with side.inside():
            found[name] = side()
    for name in sides.keys() - {"ours"}:
        for ours, theirs in zip(found["ours"], found[name], strict=True):
            off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
            assert off < (1e-5 if dtype == torch.float32 else 3e-2), (
                f"{name}: the blocks differ by {off}"
            )


def compare_blocks(found, where, short, times, say=print):
    """found[{where}_vs_{peer}_{short}] of every peer in `times`; transformers' is the faster of its two."""
    say(
        f"{where} {short}: {', '.join(f'{name} {median(times, name) * 1e3:.1f}' for name in times)} CPU ms"
    )
    faster = min(THEIR_EXPERTS, key=lambda kind: median(times, kind))
    rows = {"hf" if where == "block" else "hf_ep": faster} | {
        name: name for name in BLOCKS if name in times
    }
    for peer, side in rows.items():
        compare_pairs(found, f"{where}_vs_{peer}_{short}", times, side, "ours", say)


def block(quick, found):
    """One process."""
    peers = experts_peers.installed()
    with experts_peers.group_of_one() if peers else nullcontext():
        for short, dtype in matmul_dtypes().items():
            sides = block_sides(ParallelState.single("cpu"), dtype, 128 if quick else 1024, peers)
            assert_agree(sides, dtype)
            compare_blocks(found, "block", short, alternating(sides, PAIRS))


def python_calls(ps):
    """Python function calls of one forward, backward and AdamW step of this rank, 4 layers."""
    model, tokens = our_model(ps, torch.float32, 64, 4), torch.randint(VOCAB, (1, 64))
    for layer in model.decoder.layers.values():
        own_gradients(layer.mlp.experts)
    optimizer = fused_adamw(model)

    def step():
        model(tokens, labels=tokens.roll(-1, 1)).mean().backward()
        for layer in model.decoder.layers.values():
            for weight in (
                layer.mlp.experts.linear_fc1.weight,
                layer.mlp.experts.linear_fc2.weight,
            ):
                weight.grad = weight.main_grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return count_calls(step)


def our_step(ps, dtype, s, layers, losses, name):
    """A whole step over data ranks, and the bytes of the experts that this rank holds."""
    model = our_model(ps, dtype, s, layers)
    shard = DataParallel(model, ps)
    optimizer = ShardedAdamW(shard, OptimizerConfig(lr=1e-4))
    executor = SingleStage(model, ps=ps, grad_sync=shard)
    tokens = torch.randint(VOCAB, (ps.size("dp"), s), generator=torch.Generator().manual_seed(2))[
        ps.index("dp")
    ][None]
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}

    def step():
        stats = executor.step(batch, next_token_loss)
        optimizer.step(num_tokens=stats.num_tokens)
        optimizer.zero_grad()
        losses.setdefault(name, stats.loss.item())

    held = sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n
    )
    return step, held


def ep_rank(rank, world, store, tokens, dtypes, result):
    """One rank of the comparisons over ranks; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    say = print if rank == 0 else lambda *_: None
    ep, dp = (ParallelState.build(ParallelConfig(expert=n), device="cpu") for n in (world, 1))
    found = {
        "python_calls_moe_ep2": python_calls(ep)
    }  # before the peers and steps whose hooks would count
    peers = experts_peers.installed(say)
    for short in dtypes:
        dtype = DTYPES[short]
        sides = block_sides(ep, dtype, tokens, peers)
        assert_agree(sides, dtype)
        compare_blocks(found, "ep2", short, alternating(sides, PAIRS, total, dist.barrier), say)
        losses, steps, held = {}, {}, {}
        for name, ps in (("ep2", ep), ("ep1", dp)):
            steps[name], held[name] = our_step(ps, dtype, tokens, 4, losses, name)
        times = alternating(steps, PAIRS, total, dist.barrier)
        assert abs(losses["ep2"] - losses["ep1"]) < 1e-2, (
            f"the losses of the first step differ: {losses}"
        )
        compare_pairs(found, f"ep2_vs_ep1_{short}", times, "ep2", "ep1", say, clock=1)
        found[f"expert_bytes_ep2_{short}"] = held["ep2"] / held["ep1"]
    if rank == 0:
        with open(result, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def ranks(quick, found):
    """Two ranks: the block beside transformers' expert parallelism, and our step with and without it."""
    found |= on_ranks(ep_rank, 2, 128 if quick else 1024, list(matmul_dtypes()))


def calls(quick, found):
    """Python function calls of one step in one process."""
    found["python_calls_moe"] = python_calls(ParallelState.single("cpu"))


if __name__ == "__main__":
    run_parts(__doc__, calls, block, ranks)
