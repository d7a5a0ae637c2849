"""What planning a save and a load of a 70B model costs each of thousands of ranks: CPU seconds and memory, on paper.

    python -m benchmarks.checkpoint_plan [--quick] [--json FILE]

From what all ranks have told, as they receive it, to the plan; one process per layout (tp, pp, dp), ZeRO's cuts.
"""

import json
import multiprocessing
import resource
import time
from math import prod

from benchmarks.harness import arguments, report
from core.dist_checkpointing.planning.plan import plan_writes
from core.dist_checkpointing.planning.read_plan import from_json, plan_reads, to_json
from core.dist_checkpointing.state.catalog import merge_catalogs, with_repeated_arrays
from core.parallel_state.flat import volume
from tests.dist_checkpointing.meshes import GPT_70B
from tests.dist_checkpointing.test_read_plan import chunks_of, wants
from tests.dist_checkpointing.test_thousands import catalogue, mesh

STATES = ("optimizer/main/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
GOALS = {(8, 4, 32): 5, (8, 16, 32): 8, (8, 4, 128): 20, (8, 16, 128): 60}


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(layout, pipe):
    told, kinds, _, _ = catalogue(GPT_70B, mesh(*layout))
    messages = [json.dumps(local) for local in told]
    del told
    begin, before = time.process_time(), peak_mib()
    found = merge_catalogs(
        with_repeated_arrays([json.loads(message) for message in messages], kinds)
    )
    read = time.process_time()
    plan = plan_writes(found.arrays, found.holdings)
    seconds, peak = time.process_time() - begin, peak_mib()
    moved = [volume(f.box) * found.arrays[f.key].itemsize for wave in plan.waves for f in wave]
    share = sum(moved) / sum(prod(info.shape) * info.itemsize for info in found.arrays.values())
    pipe.send((seconds, read - begin, max(map(len, messages)), peak, before, len(moved), share))


def one_load(layout, pipe):
    """Who reads what for whom: weights on all replicas, from the main parameters, and the parts of the states."""
    layout = mesh(*layout)
    wanted, chunks = wants(GPT_70B, layout, STATES), chunks_of(GPT_70B.arrays(STATES))
    messages = [json.dumps(to_json(one)) for one in wanted]
    del wanted
    begin, before = time.process_time(), peak_mib()
    plan = plan_reads(chunks, [from_json(json.loads(message)) for message in messages], 0)
    pipe.send(
        (time.process_time() - begin, max(map(len, messages)), peak_mib(), before, plan.count)
    )


def in_a_process(call, layout):
    """What it sends."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=call, args=(layout, theirs))
    process.start()
    found = ours.recv()
    process.join()
    return found


def main():
    options = arguments(__doc__).parse_args()
    result = {}
    for layout, goal in list(GOALS.items())[: 1 if options.quick else None]:
        seconds, read, told, peak, before, moved, share = in_a_process(one, layout)
        ranks = layout[0] * layout[1] * layout[2]
        print(
            f"{ranks:6d} ranks {layout}: {seconds:6.1f} CPU s (goal {goal}), {read:.1f} of it to read what was told, "
            f"at most {told} bytes each; peak {peak:.0f} MiB ({before:.0f} before); {moved} transfers, "
            f"{share:.0%} of the bytes"
        )
        result[f"plan_seconds_{ranks}_dp{layout[2]}"] = seconds
        seconds, told, peak, before, rounds = in_a_process(one_load, layout)
        print(
            f"{'load':>12s} {layout}: {seconds:6.1f} CPU s; at most {told} bytes each; peak {peak:.0f} MiB "
            f"({before:.0f} before); {rounds} rounds"
        )
        result[f"load_plan_seconds_{ranks}_dp{layout[2]}"] = seconds
    report(result, options.json)


if __name__ == "__main__":
    main()
