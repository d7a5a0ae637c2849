"""Checkpoints of GPT-shaped training states: ours against torch.distributed.checkpoint, durable on both sides.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoint [--quick] [--json FILE] [--dir DIRECTORY]

Every phase is a torchrun of its own. Sides take turns after `os.sync()`, warmed by a tiny save and load through the
whole path. DCP has its defaults (one writer thread) and fsync; its row with four threads stands beside. Ours always
verifies what it reads, unless a row says otherwise; DCP cannot.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

from benchmarks.harness import Ratio, arguments, report
from core.dist_checkpointing.format.grid import read_bytes
from tests.dist_checkpointing.meshes import GPT_7B, GPT_124M, Mesh


def launch(ranks, role, *words):
    """The JSON that rank 0 of a role printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    command += ["-m", "benchmarks.checkpoint_rank", role, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = [
        line.removeprefix("RESULT ")
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    if done.returncode or not found:
        raise RuntimeError(f"{role} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    return json.loads(found[0])


class Table:
    """Prints a row as soon as it is known; keeps the ratios."""

    def __init__(self):
        self.result = {}

    def ratio(self, key, ours, peer):
        """`key`: times of the peer over ours."""
        found = Ratio(ours, peer)
        print(found.row(key), flush=True)
        self.result[key] = found.median

    def number(self, key, value, unit=""):
        print(f"{key:44s} {value:10.3f} {unit}", flush=True)
        self.result[key] = value


def saves_and_loads(table, path, size, pairs):
    for ranks in (1, 2):
        suffix = "" if ranks == 1 else "_2ranks"
        for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
            found = launch(ranks, "save_and_load", path, size, dtype, pairs)
            save, load = found["save"], found["load"]
            print(f"--- {ranks} rank(s), {short}: {found['bytes'] / 2**30:.2f} GiB in memory")
            table.ratio(f"save_vs_dcp_{short}{suffix}", save["ours"], save["dcp"])
            table.ratio(
                f"save_vs_dcp_4_threads_{short}{suffix}", save["ours"], save["dcp_4_threads"]
            )
            if dtype == "float32":
                table.ratio(f"save_vs_raw{suffix}", save["ours"], save["raw"])
                table.ratio(f"dcp_save_vs_raw{suffix}", save["dcp"], save["raw"])
                table.ratio(f"same_layout_load_vs_dcp{suffix}", load["ours"], load["dcp"])
                table.ratio(
                    f"same_layout_load_vs_dcp{suffix}_unverified", load["unverified"], load["dcp"]
                )
            if not (ranks == 2 and dtype == "float32"):  # what four ranks read below
                continue
            moved = launch(4, "reshard_load", path, size, dtype, pairs)
            table.ratio("reshard_load_vs_dcp", moved["warm"]["ours"], moved["warm"]["dcp"])
            table.ratio("reshard_load_vs_dcp_cold", moved["cold"]["ours"], moved["cold"]["dcp"])
            table.number("read_amplification", moved["amplification"]["ours"])
            table.number("dcp_read_amplification", moved["amplification"]["dcp"])


def the_rest(table, path, size, pairs):
    memory = launch(2, "memory", path, size, "float32", pairs)
    table.number("extra_rss_mib_save", memory["save"], "MiB per rank")
    table.number("extra_rss_mib_load", memory["load"], "MiB per rank")
    found = launch(4, "replicas", path, size, "float32", pairs)
    table.number("load_bytes_over_state_dp4", found["over_state"])
    table.ratio("shared_load_vs_each_dp4", found["shared"], found["each"])
    found = launch(1, "stall", path, size, "float32", pairs)
    ratios = [s / c for s, c in zip(found["stall"], found["copy"], strict=True)]
    for name in ("stall", "copy"):
        print(f"{name} of each save, ms: {[round(1e3 * seconds) for seconds in found[name]]}")
    table.number("stall_vs_memcpy", statistics.median(ratios))
    table.number("stall_vs_memcpy_first_save", ratios[0])
    found = launch(1, "checksums", path, size, "float32", pairs)
    cost = [a / b - 1 for a, b in zip(found["with"], found["without"], strict=True)]
    table.number("crc_wall_cost", statistics.median(cost))
    found = launch(1, "many_steps", path, size, "float32", 2 * pairs + 1)
    table.ratio("save_with_1000_steps", found["one"], found["many"])
    toy = launch(1, "save_and_load", path, "toy", "float32", 2 * pairs + 1)["save"]
    table.number(
        "toy_save_vs_dcp",
        statistics.median(o / d for o, d in zip(toy["ours"], toy["dcp"], strict=True)),
    )


def offline_reshard(table, path, size):
    """Peak memory of the command that cuts a checkpoint anew for three tensor ranks."""
    written = launch(1, "write", path, size, "float32", 1)
    command = [
        sys.executable,
        "-m",
        "core.dist_checkpointing",
        "reshard",
        f"{path}/large",
        f"{path}/cut",
        "--tp",
        "3",
    ]
    process = subprocess.Popen([*command, "--copy"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise RuntimeError(f"reshard ended with {status}")
    print(f"offline reshard of {written['bytes'] / 2**30:.2f} GiB")
    table.number("offline_reshard_rss_mib", usage.ru_maxrss / 1024, "MiB")


def amplification_of_flat_cuts(table):
    """By arithmetic: what eight data ranks read of the states that they cut equally, over what they need."""
    for name, model in (("124m", GPT_124M), ("7b", GPT_7B)):
        arrays = model.arrays()
        cuts = Mesh(dp=8, zero=True).holdings(model)
        bytes_of = [read_bytes(arrays[key], boxes) for held in cuts for key, boxes in held.items()]
        needed, read = map(sum, zip(*bytes_of, strict=True))
        table.number(f"read_amplification_zero_dp8_{name}", read / needed)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--dir", help="where to write (default: the system's temporary directory)")
    told = parser.parse_args()
    table, path = Table(), tempfile.mkdtemp(dir=told.dir)
    size, pairs = ("quick", 2) if told.quick else ("124m", 5)
    try:
        saves_and_loads(table, path, size, pairs)
        the_rest(table, path, size, pairs)
        offline_reshard(table, path, "quick" if told.quick else "large")
        amplification_of_flat_cuts(table)
    finally:
        shutil.rmtree(path)
    report(table.result, told.json)


if __name__ == "__main__":
    main()
