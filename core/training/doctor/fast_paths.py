"""What is fast on a device here, and why something is not: tried on tensors of a few numbers."""

import os
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from core.parallel_state import local_device
from core.parallel_state.collectives.groups import available_backends, default_backend
from core.training.doctor.check import Check, gib

# what inductor compiles: a Python extension with OpenMP
SOURCE = """#include <Python.h>
#include <cmath>
#include <omp.h>
extern "C" double answer(double x) { return std::sqrt(x) + omp_get_max_threads(); }
"""
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
COMPILE_S = 20.0


class Compiler:
    """A trial of the C++ compiler that torch.compile would call; runs beside other work until `check()`."""

    def __init__(self) -> None:
        self.name = os.environ.get("CXX") or "g++"
        self._folder = tempfile.TemporaryDirectory(prefix="paracore-report-")
        source = Path(self._folder.name) / "trial.cpp"
        source.write_text(SOURCE)
        include = f"-I{sysconfig.get_path('include')}"
        command = [*self.name.split(), "-shared", "-fPIC", "-fopenmp", include, str(source), "-o", f"{source}.so"]
        self._process: subprocess.Popen | None = None
        self._error = ""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            self._error = f"{self.name} does not start: {error.strerror}"

    def check(self, device: torch.device) -> Check:
        """Whether it made a library, and what to install where it did not."""
        error = self._wait()
        self._folder.cleanup()
        if error:
            return Check(name="torch.compile", value=error, status="off", remedy=self._remedy(error))
        if device.type != "cpu" and find_spec("triton") is None:
            value = f"{self.name} works, but triton is not installed"
            return Check(name="torch.compile", value=value, status="off", remedy="pip install triton")
        return Check(name="torch.compile", value=f"{self.name} works", status="ok")

    def _wait(self) -> str:
        if self._process is None:
            return self._error
        try:
            _, text = self._process.communicate(timeout=COMPILE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"{self.name} took more than {COMPILE_S:g} s"
        lines = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["no reason given"]
        return "" if self._process.returncode == 0 else f"{self.name}: {lines[0].strip()[:200]}"

    def _remedy(self, error: str) -> str:
        if "Python.h" in error:
            return "install Python's headers: apt-get install python3-dev"
        if any(word in error for word in ("omp.h", "openmp", "-lgomp", "-lomp")):
            return "install OpenMP for this compiler: apt-get install libgomp1 libomp-dev"
        return "install a C++ compiler: apt-get install g++, or name one: export CXX=clang++"


def fast_paths(kind: str | None, compiler: Compiler) -> Iterator[Check]:
    """Devices, backends, attention kernels, the fused optimizer and the compiler, on the device asked for."""
    try:
        device = local_device(kind)
    except ValueError as error:
        remedy = "give a device of this machine, or leave --device out"
        yield Check(name="device asked for", value=str(error), status="missing", remedy=remedy, required=True)
        device = torch.device("cpu")
    yield devices(device)
    yield from backends(device)
    yield attention(device)
    yield fused_adamw(device)
    yield compiler.check(device)


def devices(device: torch.device) -> Check:
    """The accelerators of this machine with their memory; what is free is told of `device`, whose context exists."""
    if device.type == "cpu":
        return _no_accelerator()
    module, found = torch.get_device_module(device), []
    for index in range(torch.accelerator.device_count()):
        name = module.get_device_name(index) if hasattr(module, "get_device_name") else device.type
        about = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        size = getattr(about, "total_memory", 0)
        free = module.mem_get_info(index)[0] if index == device.index and hasattr(module, "mem_get_info") else 0
        told = (f", {gib(size)}" if size else "") + (f", {gib(free)} free" if free else "")
        found.append(f"{device.type}:{index} {name}{told}")
    return Check(name="device", value="; ".join(found), status="ok")


def _no_accelerator() -> Check:
    here = [path for path in ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0") if Path(path).exists()]
    if torch.accelerator.is_available():
        return Check(name="device", value="cpu, as asked; this machine has an accelerator too", status="info")
    if not here:
        return Check(name="device", value="cpu; this machine has no accelerator", status="info")
    value = f"cpu; {here[0]} is an accelerator that this torch ({torch.__version__}) cannot use"
    remedy = "install the torch build for it and its driver: https://pytorch.org/get-started/locally"
    return Check(name="device", value=value, status="off", remedy=remedy)


def backends(device: torch.device) -> Iterator[Check]:
    """What processes talk through: gloo always, and the device's own."""
    have = available_backends()
    for name in dict.fromkeys(["gloo", default_backend(device.type)]):
        there = name in have or (name not in ("gloo", "nccl", "xccl") and name != "none")  # of a plug-in: it says so
        remedy = None if there else f"install a torch that was built with {name}: https://pytorch.org/get-started"
        yield Check(
            name=name,
            value="in this torch" if there else "not in this torch",
            status="ok" if there else "missing",
            remedy=remedy,
            required=True,
        )
    others = [name for name in have if name not in ("gloo", default_backend(device.type))]
    if others:
        yield Check(name="other backends", value=", ".join(others), status="info")


def attention(device: torch.device) -> Check:
    """Which kernels of scaled_dot_product_attention work, causal, at the dtype of a run."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.ones(1, 2, 16, 64, device=device, dtype=dtype)
    works, not_here, reasons = [], [], ""
    for name, kernel in KERNELS.items():
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(kernel):
            warnings.simplefilter("always")
            try:
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
                works.append(name)
            except RuntimeError:
                not_here.append(name)
                reasons = reasons or "; ".join(str(warning.message).split(" (Triggered")[0] for warning in said)[:300]
    value = f"{', '.join(works) or 'none'} on {device.type} at {str(dtype).removeprefix('torch.')}"
    value += f"; not there: {', '.join(not_here)}" if not_here else ""
    shut = [name for name in ("flash", "mem_efficient", "math") if not _enabled(name)]
    if shut:
        calls = "; ".join(f"torch.backends.cuda.enable_{name}_sdp(True)" for name in shut)
        return Check(name="attention", value=f"{value}; switched off: {', '.join(shut)}", status="off", remedy=calls)
    if set(works) <= {"math"}:
        remedy = "a torch build for this device has a fused kernel" + (f" ({reasons})" if reasons else "")
        return Check(name="attention", value=value, status="off", remedy=remedy)
    return Check(name="attention", value=value, status="ok")


def _enabled(name: str) -> bool:
    return bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())  # for every device, whatever its name says


def fused_adamw(device: torch.device) -> Check:
    """Whether torch's one-kernel AdamW runs here; optimizers of this project are built on it."""
    p, g, m, v = ([torch.ones(4, device=device)] for _ in range(4))
    try:
        torch._fused_adamw_(
            p,
            g,
            m,
            v,
            [],
            [torch.ones((), device=device)],
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        works = bool((p[0] < 1).all())
    except (RuntimeError, AttributeError) as error:
        value = f"not on {device.type}: {str(error).splitlines()[0][:200]}"
        return Check(
            name="fused AdamW", value=value, status="off", remedy="install a torch build with kernels for this device"
        )
    return Check(name="fused AdamW", value=f"on {device.type}", status="ok" if works else "off")
