"""One line each on what a run needs: packages, and the machine. No check raises, and none imports an extra."""

import importlib
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

Status = Literal["ok", "missing", "off", "info"]
PYTHON = (3, 11)
REQUIRED = {"torch": "2.11", "numpy": "1.26", "einops": "0.8", "tensorstore": "0.1.70", "zarr": "3.1"}
# extra -> {distribution: what it is for}
EXTRAS = {
    "train": {
        "tokenizers": "training and loading tokenizers; without it text is bytes",
        "tyro": "flags of the command line",
        "rich": "the progress bar",
        "matplotlib": "report.png",
        "tomli_w": "writing configuration files",
    },
    "data": {
        "pyarrow": "reading .parquet",
        "datasets": "reading Hugging Face data sets",
        "zstandard": "reading .zst",
    },
    "log": {"tensorboard": "TensorBoard's curves", "wandb": "Weights & Biases, offline or not"},
}
LEAST_SHM = 1 << 30
LEAST_FILES = 4096
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    status: "ok"; "missing": does not work; "off": works, but a faster or fuller way is shut; "info".
    remedy: what to type or to change, None where there is nothing to do. required: a run needs it.
    """

    name: str
    value: str
    status: Status
    remedy: str | None = None
    required: bool = False


def version_numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"; stops at the first part that is no number."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def packages() -> Iterator[Check]:
    """Python, this package, what it requires (imported, so that a broken one is found), and every extra."""
    text, least = platform.python_version(), ".".join(map(str, PYTHON))
    enough = sys.version_info[:2] >= PYTHON
    remedy = None if enough else f"install Python {least} or newer"
    where = f"{text} at {sys.executable}"
    yield Check(name="Python", value=where, status="ok" if enough else "missing", remedy=remedy, required=True)
    ours = _version("paracore")
    value = ours or "the source tree alone; its version is not known"
    yield Check(
        name="paracore", value=value, status="ok" if ours else "info", remedy=None if ours else "pip install -e ."
    )
    for name, least in REQUIRED.items():
        yield required(name, least)
    for extra, parts in EXTRAS.items():
        for name, purpose in parts.items():
            yield optional(name, extra, purpose)


def required(name: str, least: str) -> Check:
    """A package without which nothing runs: imported, and new enough."""
    remedy = f"pip install '{name}>={least}'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        what = "not installed" if error.name == name else f"does not import: {error}"
        return Check(name=name, value=what, status="missing", remedy=remedy, required=True)
    except Exception as error:  # a library that it needs is of another version
        what = f"does not import: {type(error).__name__}: {_first_line(error)}"
        remedy = f"pip install --force-reinstall '{name}>={least}'"
        return Check(name=name, value=what, status="missing", remedy=remedy, required=True)
    found = str(getattr(module, "__version__", None) or _version(name) or "?")
    if version_numbers(found) and version_numbers(found) < version_numbers(least):
        value = f"{found}, older than {least}"
        return Check(name=name, value=value, status="missing", remedy=remedy, required=True)
    return Check(name=name, value=found + (_build() if name == "torch" else ""), status="ok", required=True)


def optional(name: str, extra: str, purpose: str) -> Check:
    """A package of an extra: whether it is there, without the time of its import."""
    try:
        there = find_spec(name) is not None
    except ValueError:  # somebody put None in its place
        there = False
    if there:
        return Check(name=name, value=_version(name) or "installed", status="ok")
    value = f"not installed ({purpose})"
    return Check(name=name, value=value, status="off", remedy=f"pip install 'paracore[{extra}]'")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _build() -> str:
    for kind in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, kind, None):
            return f", built for {kind} {version}"
    return ", built for the CPU"


def machine() -> Iterator[Check]:
    """Cores and threads, memory, shared memory, open files."""
    for check in (cpu, memory, shared_memory, open_files):
        yield _safely(check)


def _safely(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (OSError, ValueError, AttributeError) as error:  # another kernel, a locked-down container
        return Check(name=check.__name__.replace("_", " "), value=f"not known: {_first_line(error)}", status="info")


def cpu() -> Check:
    """Cores of the machine, those that this process may use, and the threads that torch starts on them."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share, threads = _cpu_share(), torch.get_num_threads()
    told = os.environ.get("OMP_NUM_THREADS")
    parts = [f"{os.cpu_count()} cores"]
    if len(usable) < (os.cpu_count() or 1):
        parts.append(f"pinned to {len(usable)} of them ({_ranges(usable)})")
    if share is not None and share < len(usable):
        parts.append(f"limited to the time of {share:g}")
    parts.append(f"torch uses {threads} threads, OMP_NUM_THREADS {'is ' + told if told else 'is not set'}")
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


def gib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"
