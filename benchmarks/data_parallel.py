"""Data-parallel training steps on two gloo ranks: our ZeRO 0-3 against DDP, FSDP2, torch's ZeRO-1 and DeepSpeed.

    OMP_NUM_THREADS=1 python -m benchmarks.data_parallel [--quick] [--json FILE] [--engines A,B] [--parts A,B]

Starts its ranks by itself. DeepSpeed takes part where it is installed. It compiles a C++ extension at its first use,
and a build that was killed leaves a lock on which it would wait forever: then a line says so, and it is left out.

compute: 4 layers of 256, 512 tokens a rank, 5.3 M parameters. communication: 4 layers of 384, 64 tokens, 10.2 M.
Same weights, data, threads, clipping and fused AdamW on all sides, and the losses of all steps must agree. Ratios are
our time over the peer's: lower is better everywhere.
"""

import glob
import json
import os
import statistics
import subprocess
import sys

from benchmarks.data_parallel_sides import deepspeed_installed
from benchmarks.harness import arguments, report

# neighbours are compared, so they take turns directly
ORDER = [
    *(
        "deepspeed0",
        "zero_redundancy",
        "zero2",
        "zero0",
        "ddp",
        "zero1",
        "deepspeed1",
        "deepspeed2",
    ),
    *(
        "zero3_executor",
        "fsdp2",
        "zero3",
        "deepspeed3",
        "zero0_executor",
        "zero1_executor",
        "zero2_executor",
    ),
]
DEFAULT = [
    name
    for name in ORDER
    if not name.endswith("_executor") and name not in ("deepspeed0", "deepspeed2")
]
KEYS = {
    "compute": {
        "zero0_vs_ddp": ("zero0", "ddp", 1.02),
        "zero1_vs_ddp": ("zero1", "ddp", 1.02),
        "zero3_vs_fsdp2": ("zero3", "fsdp2", 0.80),
        "zero1_vs_deepspeed1": ("zero1", "deepspeed1", 0.90),
    },
    "communication": {
        "zero0_vs_ddp_comm": ("zero0", "ddp", None),
        "zero1_vs_ddp_comm": ("zero1", "ddp", 1.05),
        "zero3_vs_fsdp2_comm": ("zero3", "fsdp2", None),
        "zero1_vs_deepspeed1_comm": ("zero1", "deepspeed1", 0.60),
    },
}
CALLS_GOAL, OPTIMIZER_GOAL = 2000, 1.1


def launch(ranks, *words):
    """The JSON that rank 0 of a role printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    command += ["-m", "benchmarks.data_parallel_rank", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = [
        line.removeprefix("RESULT ")
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if done.returncode or not found:
        raise RuntimeError(
            f"{' '.join(map(str, words))} on {ranks} ranks failed:\n{done.stderr[-3000:]}"
        )
    return json.loads(found[0])


def usable_deepspeed():
    """Whether DeepSpeed is here and not waiting for a build that nobody finishes."""
    if not deepspeed_installed():
        return False
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser(
        "~/.cache/torch_extensions"
    )
    if locks := glob.glob(f"{folder}/**/lock", recursive=True):
        print(
            f"without DeepSpeed: it would wait for {locks[0]}; if no build is running, remove that file"
        )
        return False
    return True


def ratios(ours, peer):
    each = [a / b for a, b in zip(ours, peer, strict=True)]
    return statistics.median(each), min(each), max(each)


def against(goal):
    return "" if goal is None else f"  goal {goal}"


def check_losses(losses):
    """All sequences alike; returns the largest relative difference to the first one's."""
    (base, first), *others = losses.items()
    worst = 0.0
    for name, found in others:
        differences = [abs(a - b) / abs(b) for a, b in zip(found, first, strict=True)]
        assert max(differences) < 1e-5, (
            f"the losses of {name} and {base} differ by {max(differences):.1e}: {found}"
        )
        worst = max(worst, *differences)
    return worst


def compare_steps(setting, engines, keys, args):
    """Prints every engine over DDP (or the first engine), then the keys; returns the keys' medians."""
    size = "quick" if args.quick else setting
    found = launch(
        2, "steps", size, ",".join(engines), 3 if args.quick else 9, 2 if args.quick else 4
    )
    seconds, worst = found["seconds"], check_losses(found["losses"])
    base = "ddp" if "ddp" in seconds else engines[0]
    first = found["losses"][base]
    print(
        f"--- {setting}: losses of {len(first)} steps {first[0]:.4f} .. {first[-1]:.4f}, equal to {worst:.0e}"
    )
    for name in engines:
        median, low, high = ratios(seconds[name], seconds[base])
        took = 1e3 * statistics.median(seconds[name])
        processor = ratios(found["processor"][name], found["processor"][base])[0]
        print(
            f"{name:28s} {took:8.1f} ms   {median:6.3f} of {base} ({low:.2f} .. {high:.2f}), "
            f"{processor:6.3f} of its processor time"
        )
    result = {}
    for key, (ours, peer, goal) in keys.items():
        if ours in seconds and peer in seconds:
            result[key], low, high = ratios(seconds[ours], seconds[peer])
            pairs = len(seconds[ours])
            print(
                f"{key:28s} {result[key]:8.3f} ({low:.2f} .. {high:.2f}, {pairs} pairs){against(goal)}",
                flush=True,
            )
    return result


def count_calls(engines):
    found = launch(2, "calls", ",".join(engines))
    mine = [f"zero{stage}" for stage in range(4)]
    for name, number in found.items():
        print(
            f"{'python_calls_' + name:28s} {number:8d}{against(CALLS_GOAL if name in mine else None)}"
        )
    result = {f"python_calls_{name}": found[name] for name in mine if name in found}
    return result | ({"python_calls": max(result.values())} if result else {})


def optimizer_step(quick):
    found = launch(1, "optimizer", 2**22 if quick else 2**24, 5 if quick else 15)
    for name, side in found.items():
        low, high = min(side["ratio"]), max(side["ratio"])
        print(
            f"{'optimizer, ' + name:28s} {side['ns']:8.3f} ns per parameter, memcpy {side['memcpy_ns']:.3f}: ratio "
            f"{statistics.median(side['ratio']):.3f} ({low:.2f} .. {high:.2f}, {len(side['ratio'])} pairs)"
        )
    print(f"{'':28s} (torch: fused AdamW alone on one flat tensor){against(OPTIMIZER_GOAL)}")
    return {
        "optimizer_ns_per_param": found["ours"]["ns"],
        "optimizer_vs_memcpy": statistics.median(found["ours"]["ratio"]),
    }


def main():
    parser = arguments(__doc__)
    parser.add_argument("--engines", default=",".join(DEFAULT), help=f"of {','.join(ORDER)}")
    parser.add_argument("--parts", default="compute,communication,calls,optimizer")
    args = parser.parse_args()
    engines, parts = args.engines.split(","), args.parts.split(",")
    if unknown := (set(engines) - set(ORDER)) | (set(parts) - {*KEYS, "calls", "optimizer"}):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    engines = sorted(engines, key=ORDER.index)
    if any(name.startswith("deepspeed") for name in engines) and not usable_deepspeed():
        engines = [name for name in engines if not name.startswith("deepspeed")]
    result = {}
    for setting, keys in KEYS.items():
        if setting in parts:
            result |= compare_steps(setting, engines, keys, args)
    if "calls" in parts:
        result |= count_calls(engines)
    if "optimizer" in parts:
        result |= optimizer_step(args.quick)
    report(result, args.json)


if __name__ == "__main__":
    main()
