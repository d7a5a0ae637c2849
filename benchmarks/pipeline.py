"""Our pipeline executor against torch.distributed.pipelining, in one run of four gloo processes.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline [--quick] [--parts PART ...] [--json FILE]

Sleeping stages (a rank's whole slice costs the same F, I and W per microbatch) measure schedules and executors on
few cores; real stages of plain nn.Linear with whole-stage recomputation measure what a user gets. Ideal is
M (F + I + W), with recomputation M (F + R + I + W). Beside each step: what the player predicts, and what one rank
alone without any message needs in the same harness. `bound`: a step of GPTModel over what its kernels and messages
cost when they are called bare (benchmarks.pipeline_bound).
"""

import os
import socket
import statistics
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils.checkpoint import checkpoint

from benchmarks import pipeline_backward
from benchmarks.harness import arguments, in_turns, matmul_dtypes, report, spread, timed
from benchmarks.pipeline_bound import over_bound
from benchmarks.sleeping import OurStage, TorchStage, precise_naps
from core.parallel_state import ParallelConfig, ParallelState
from core.pipeline import Costs, Pipeline, play
from core.pipeline.schedule import schedules as named
from core.pipeline.search.search import search

MICROBATCHES, HIDDEN = 8, 64
TORCH = {"zb-v": "ZBVZeroBubble", "1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}


def our_sleep(ps, schedule, seconds, recompute="none"):
    """One step of our pipeline over napping stages."""
    is_name = isinstance(schedule, str)
    base = named.make(schedule, ps.size("pp"), MICROBATCHES) if is_name else schedule
    mine = base.stages_of(ps.index("pp"))
    stages = {s: OurStage({k: v / len(mine) for k, v in seconds.items()}, HIDDEN) for s in mine}
    pipeline = Pipeline(
        stages, ps=ps, schedule=base, num_microbatches=MICROBATCHES, recompute=recompute
    )
    batch = {"x": torch.randn(MICROBATCHES, HIDDEN), "target": torch.zeros(MICROBATCHES, HIDDEN)}
    return lambda: pipeline.step(
        batch, lambda y, part: ((y - part["target"]).square().sum(), y.numel())
    )


def torch_step(schedule, ps, modules, x, target, loss_fn):
    """One step of torch's schedule of the same name over these modules."""
    placement = named.placement(schedule, ps.size("pp"))
    mine = [s for s, rank in enumerate(placement) if rank == ps.index("pp")]
    made = [
        PipelineStage(m, s, len(placement), torch.device("cpu"))
        for m, s in zip(modules, mine, strict=True)
    ]
    kind = get_schedule_class(TORCH[schedule])
    single = issubclass(kind, PipelineScheduleSingle)
    run = kind(made[0] if single else made, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    last = len(placement) - 1 in mine

    def step():
        for module in modules:
            module.zero_grad(set_to_none=False)
        losses = []
        run.step(
            *((x,) if 0 in mine else ()), **({"target": target, "losses": losses} if last else {})
        )
        return sum(losses)

    return step


def torch_sleep(ps, schedule, seconds):
    placement = named.placement(schedule, ps.size("pp"))
    mine = [s for s, rank in enumerate(placement) if rank == ps.index("pp")]
    modules = [
        TorchStage({k: v / len(mine) for k, v in seconds.items()}, HIDDEN, s == 0) for s in mine
    ]
    x, target = torch.randn(MICROBATCHES, HIDDEN), torch.zeros(MICROBATCHES, HIDDEN)
    return torch_step(schedule, ps, modules, x, target, F.mse_loss)


def sleeping(ps, schedule, milliseconds, pairs, say):
    """(median step / ideal of ours, the same over simulated x one rank alone, median of ours / torch)."""
    seconds = {k: milliseconds / 1e3 for k in "FIW"}
    ideal = MICROBATCHES * sum(seconds.values())
    ours = our_sleep(ps, schedule, seconds)
    ratio = in_turns(ours, torch_sleep(ps, schedule, seconds), pairs)
    chunks = len(named.placement(schedule, 4)) // 4
    predicted = (
        play(named.make(schedule, 4, MICROBATCHES), Costs(**seconds).divided(chunks)).makespan
        / ideal
    )
    single = our_sleep(ParallelState.single("cpu"), schedule, seconds)
    single()
    alone = [timed(single, together=False) / ideal for _ in range(3)]
    over = [[t / ideal for t in side] for side in (ratio.ours, ratio.peer)]
    against = [o / p for o, p in zip(*over, strict=True)]
    executor = statistics.median(over[0]) / predicted / statistics.median(alone)
    say(
        f"{schedule:5s} {milliseconds:3g} ms  step/ideal: simulated {predicted:.4f}, one rank alone {spread(alone)}, "
        f"ours {spread(over[0])}, torch {spread(over[1])}; ours/torch {spread(against)}; "
        f"ours / (simulated x alone) {executor:.4f}"
    )
    return statistics.median(over[0]), executor, statistics.median(against)


def ahead(ps, schedule, pairs, say):
    """Step with R ahead of its gradient over the step with R as a part of I, every stage recomputed."""
    seconds = {k: 0.04 for k in "FIW"}
    within = seconds | {"I": 0.08}
    ratio = in_turns(
        our_sleep(ps, schedule, seconds, "stage"), our_sleep(ps, schedule, within), pairs
    )
    gain = [o / p for o, p in zip(ratio.ours, ratio.peer, strict=True)]
    say(f"{schedule:5s}  40 ms  full recompute: R ahead / R folded into I {spread(gain)}")
    return statistics.median(gain)


def automatic(ps, memory_limit, pairs, say):
    """(simulated step / ideal, measured / simulated) of what the search finds, every stage recomputed."""
    whole = {"F": 0.04, "R": 0.04, "I": 0.046, "W": 0.034}
    costs, stages = Costs(**whole, saved=0.1).divided(2), named.auto_placement(4)
    found = search(
        stages,
        MICROBATCHES,
        costs,
        recompute=range(8),
        memory_limit=memory_limit,
        candidates=named.candidates(stages, MICROBATCHES),
    )
    predicted, ideal = found.played.makespan, MICROBATCHES * sum(whole.values())
    step = our_sleep(ps, found.schedule, whole, "stage")
    step()
    measured = [timed(step) / predicted for _ in range(pairs)]
    say(
        f"auto   40 ms  full recompute, memory {memory_limit}: simulated step/ideal {predicted / ideal:.4f}, "
        f"measured / simulated {spread(measured)}"
    )
    return predicted / ideal, statistics.median(measured)


class PlainStage(nn.Module):
    """Plain torch modules on both sides; `checkpointed` is how torch recomputes a stage."""

    def __init__(self, first, last, *, checkpointed, hidden=256, layers=2, vocab=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden) if first else None
        self.layers = nn.Sequential(*[pipeline_backward.GeluLayer(hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, vocab) if last else None
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        x = checkpoint(self.layers, x, use_reentrant=False) if self.checkpointed else self.layers(x)
        return x if self.head is None else self.head(x)


def cross_entropy(y, labels):
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="sum")


def computing(ps, recompute, pairs, say):
    """Real stages, zb-v on 2 ranks: our step over torch's."""
    placement = named.placement("zb-v", 2)
    mine = [s for s, rank in enumerate(placement) if rank == ps.index("pp")]

    def stages(checkpointed):
        made = {}
        for s in mine:
            torch.manual_seed(100 + s)
            made[s] = PlainStage(s == 0, s == len(placement) - 1, checkpointed=checkpointed)
        return made

    torch.manual_seed(1)
    x = torch.randint(512, (MICROBATCHES, 128))
    batch = {"x": x, "labels": x.roll(-1, 1)}
    ours, theirs = stages(False), stages(recompute == "stage")
    pipeline = Pipeline(
        ours, ps=ps, schedule="zb-v", num_microbatches=MICROBATCHES, recompute=recompute
    )

    def our_step():
        for module in ours.values():
            module.zero_grad(set_to_none=False)
        pipeline.step(
            batch, lambda y, part: (cross_entropy(y, part["labels"]), part["labels"].numel())
        )

    peer = torch_step("zb-v", ps, list(theirs.values()), x, batch["labels"], cross_entropy)
    our_step()
    peer()
    for s in mine:
        for (name, a), b in zip(ours[s].named_parameters(), theirs[s].parameters(), strict=True):
            torch.testing.assert_close(
                a.grad, b.grad, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    ratio = in_turns(our_step, peer, pairs)
    against = [o / p for o, p in zip(ratio.ours, ratio.peer, strict=True)]
    say(
        f"zb-v, 2 ranks, real stages, recompute={recompute}: ours {spread(ratio.ours)} s, "
        f"torch {spread(ratio.peer)} s, ours/torch {spread(against)}"
    )
    return statistics.median(against)


def four_ranks(ps, quick, say):
    result, pairs = {}, 2 if quick else 5
    for schedule, ms, key in (
        ("zb-v", 40, "step_over_ideal_zbv"),
        ("1f1b", 40, "step_over_ideal_1f1b"),
    ):
        result[key], executor, against = sleeping(ps, schedule, ms, pairs, say)
        if schedule == "zb-v":
            result["zbv_vs_torch_40ms"], result["zbv_over_simulated_and_alone"] = against, executor
    more = pairs if quick else 11  # short steps are noisier
    result["step_over_ideal_zbv_4ms"], _, result["zbv_vs_torch_4ms"] = sleeping(
        ps, "zb-v", 4, more, say
    )
    result["step_over_ideal_1f1b_4ms"], *_ = sleeping(ps, "1f1b", 4, more, say)
    result["recompute_ahead_gain_1f1b"] = ahead(ps, "1f1b", pairs, say)
    result["recompute_ahead_gain_zbv"] = ahead(ps, "zb-v", pairs, say)
    for limit in (2, 4):
        key = f"auto_step_over_ideal_memory_{limit}"
        result[key], result[f"auto_measured_over_simulated_memory_{limit}"] = automatic(
            ps, limit, pairs, say
        )
    return result


def two_ranks(ps, quick, say):
    pairs = 2 if quick else 5
    return {
        "compute_zbv_stage_recompute_vs_torch": computing(ps, "stage", pairs, say),
        "compute_zbv_vs_torch": computing(ps, "none", pairs, say),
    }


def near_the_bound(ps, quick, say, dtypes):
    pairs = 3 if quick else 11
    keys = {"fp32": "over_bound_pp2", "bf16": "over_bound_pp2_bf16"}
    return {
        keys[short]: over_bound(ps, quick, dtype, pairs, say) for short, dtype in dtypes.items()
    }


def work(rank, world, port, run, options, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    precise_naps()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ps = ParallelState.build(ParallelConfig(pipeline=world), device="cpu")
    say = (lambda text: print(text, flush=True)) if rank == 0 else (lambda text: None)
    quick, *more = options
    result = run(ps, quick, say, *more)
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()


def launch(world, run, *options):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (world, port, run, options, queue), nprocs=world)
    return queue.get()


def backward_part(quick):
    print("one process: the two halves of backward (benchmarks.pipeline_backward)")
    return pipeline_backward.measure(quick)


def sleeping_part(quick):
    print(
        "4 gloo ranks on 2 cores, 8 microbatches, one thread each; sleeping stages cost F = I = W"
    )
    return launch(4, four_ranks, quick)


PARTS = {
    "backward": backward_part,
    "sleeping": sleeping_part,
    "computing": lambda quick: launch(2, two_ranks, quick),
    "bound": lambda quick: launch(2, near_the_bound, quick, matmul_dtypes()),
}


def main():
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    result = {}
    for part in args.parts:
        result |= PARTS[part](args.quick)
    report(result, args.json)


if __name__ == "__main__":
    main()
