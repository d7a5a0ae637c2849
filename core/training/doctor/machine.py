"""Cores and threads, memory, shared memory, open files. No check raises."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from core.training.doctor.check import Check, first_line, gib

MIN_SHARED_MEMORY = 1 << 30  # bytes
MIN_OPEN_FILES = 4096
ENOUGH_OPEN_FILES = 65536
CGROUP = Path("/sys/fs/cgroup")


def machine() -> Iterator[Check]:
    """Cores and threads, memory, shared memory, open files."""
    for check in (cpu, memory, shared_memory, open_files):
        yield _result_or_error(check)


# a check that fails says so in its line: the report must come out on every machine
def _result_or_error(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (OSError, ValueError, AttributeError) as error:
        # another kernel, a locked-down container
        return Check(
            name=check.__name__.replace("_", " "),
            value=f"not known: {first_line(error)}",
            status="info",
        )


def cpu() -> Check:
    """Cores of the machine, those that this process may use, and the threads that torch starts on them."""
    cores = os.cpu_count() or 1
    usable = list(range(cores))
    if hasattr(os, "sched_getaffinity"):
        usable = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota()
    threads = torch.get_num_threads()

    noun = "cores" if cores > 1 else "core"
    facts = [f"{os.cpu_count()} {noun}"]
    if len(usable) < cores:
        facts.append(f"pinned to {len(usable)} of them ({_in_ranges(usable)})")
    if quota is not None and quota < len(usable):
        facts.append(f"limited to the time of {quota:g}")
    noun = "threads" if threads > 1 else "thread"
    facts.append(f"torch uses {threads} {noun}")
    facts.append(f"OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS') or 'not set'}")
    value = "; ".join(facts)

    # the narrower of two limits: cores, and the time on them
    available = min(len(usable), quota or len(usable))
    # more threads than cores wait for each other
    if threads > max(1, available):
        remedy = f"export OMP_NUM_THREADS={max(1, int(available))}, divided by the processes on this machine"
        return Check(name="CPU", value=value, status="off", remedy=remedy)
    return Check(name="CPU", value=value, status="ok")


def _in_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []  # [first, last]
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container grants; None without a limit."""
    path = CGROUP / "cpu.max"
    if not path.exists():
        return None
    # microseconds of CPU time per period
    quota, period = path.read_text().split()
    if quota == "max":
        return None
    return int(quota) / int(period)


def memory() -> Check:
    """Memory of the machine, and the limit of the container."""
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, text = line.split(":")
        # the file is in KiB
        sizes[name] = int(text.split()[0]) << 10
    value = f"{gib(sizes['MemTotal'])}, {gib(sizes['MemAvailable'])} available"
    limit_file = CGROUP / "memory.max"
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    if limit != "max" and int(limit) < sizes["MemTotal"]:
        value += f"; this container may use {gib(int(limit))}"
    return Check(name="memory", value=value, status="info")


def shared_memory() -> Check:
    """/dev/shm, where NCCL and processes of one machine exchange data."""
    blocks = os.statvfs("/dev/shm")
    size = blocks.f_blocks * blocks.f_frsize
    free = blocks.f_bavail * blocks.f_frsize
    value = f"{gib(size)}, {gib(free)} free"
    if free >= MIN_SHARED_MEMORY:
        return Check(name="/dev/shm", value=value, status="ok")
    wanted = gib(MIN_SHARED_MEMORY)
    remedy = (
        f"give it {wanted} or more: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    )
    return Check(name="/dev/shm", value=value, status="off", remedy=remedy)


def open_files() -> Check:
    """How many files and connections one process may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    value = f"{'no limit' if soft == unlimited else soft} per process"
    if soft == unlimited or soft >= MIN_OPEN_FILES:
        return Check(name="open files", value=value, status="ok")
    if hard == unlimited:
        possible = ENOUGH_OPEN_FILES
    else:
        possible = min(hard, ENOUGH_OPEN_FILES)
    value += f", at most {'no limit' if hard == unlimited else hard}"
    return Check(name="open files", value=value, status="off", remedy=f"ulimit -n {possible}")
