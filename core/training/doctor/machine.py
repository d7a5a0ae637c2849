"""Cores and threads, memory, shared memory, open files. No check raises."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from core.training.doctor.check import Check, first_line, gib

LEAST_SHM = 1 << 30
LEAST_FILES = 4096
CGROUP = Path("/sys/fs/cgroup")


def machine() -> Iterator[Check]:
    """Cores and threads, memory, shared memory, open files."""
    for check in (cpu, memory, shared_memory, open_files):
        yield _safely(check)


def _safely(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (OSError, ValueError, AttributeError) as error:  # another kernel, a locked-down container
        return Check(name=check.__name__.replace("_", " "), value=f"not known: {first_line(error)}", status="info")


def cpu() -> Check:
    """Cores of the machine, those that this process may use, and the threads that torch starts on them."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share, threads = _cpu_share(), torch.get_num_threads()
    told = os.environ.get("OMP_NUM_THREADS")
    parts = [f"{os.cpu_count()} core{'s' if (os.cpu_count() or 1) > 1 else ''}"]
    if len(usable) < (os.cpu_count() or 1):
        parts.append(f"pinned to {len(usable)} of them ({_ranges(usable)})")
    if share is not None and share < len(usable):
        parts.append(f"limited to the time of {share:g}")
    parts.append(f"torch uses {threads} thread{'s' if threads > 1 else ''}")
    parts.append(f"OMP_NUM_THREADS is {told or 'not set'}")
    room = min(len(usable), share or len(usable))
    if threads > max(1, room):
        remedy = f"export OMP_NUM_THREADS={max(1, int(room))}, divided by the processes on this machine"
        return Check(name="CPU", value="; ".join(parts), status="off", remedy=remedy)
    return Check(name="CPU", value="; ".join(parts), status="ok")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _cpu_share() -> float | None:
    """Cores' worth of time that the container grants; None without a limit."""
    path = CGROUP / "cpu.max"
    if not path.exists():
        return None
    quota, period = path.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def memory() -> Check:
    """Of the machine or the container's share of it."""
    rows = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    facts = {name: int(value.split()[0]) << 10 for name, value in rows}
    value = f"{gib(facts['MemTotal'])}, {gib(facts['MemAvailable'])} available"
    limit = CGROUP / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max" and int(text) < facts["MemTotal"]:
        value += f"; this container may use {gib(int(text))}"
    return Check(name="memory", value=value, status="info")


def shared_memory() -> Check:
    """/dev/shm, where NCCL and processes of one machine exchange data."""
    facts = os.statvfs("/dev/shm")
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    value = f"{gib(size)}, {gib(free)} free"
    if free >= LEAST_SHM:
        return Check(name="/dev/shm", value=value, status="ok")
    remedy = f"give it {gib(LEAST_SHM)} or more: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    return Check(name="/dev/shm", value=value, status="off", remedy=remedy)


def open_files() -> Check:
    """How many files and connections one process may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    value = f"{'no limit' if soft == endless else soft} per process"
    if soft == endless or soft >= LEAST_FILES:
        return Check(name="open files", value=value, status="ok")
    reach = 65536 if hard == endless else min(hard, 65536)
    value += f", at most {'no limit' if hard == endless else hard}"
    return Check(name="open files", value=value, status="off", remedy=f"ulimit -n {reach}")
