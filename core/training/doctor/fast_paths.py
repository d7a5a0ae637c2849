"""Which fast paths work on a device, and why others do not: each is tried on tensors of a few numbers."""

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
from core.parallel_state.environment import check_dtype, note_on_bf16
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
    """Runs the C++ compiler that torch.compile would call, beside other checks, until `check()`."""

    def __init__(self) -> None:
        self.name = os.environ.get("CXX") or "g++"
        self._folder = tempfile.TemporaryDirectory(prefix="paracore-report-")
        source = Path(self._folder.name) / "trial.cpp"
        source.write_text(SOURCE)
        include = f"-I{sysconfig.get_path('include')}"
        command = [
            *self.name.split(),
            "-shared",
            "-fPIC",
            "-fopenmp",
            include,
            str(source),
            "-o",
            f"{source}.so",
        ]
        self._process: subprocess.Popen | None = None
        self._error = ""
        try:
            # beside the other checks: compiling takes seconds
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self._error = f"{self.name} does not start: {error.strerror}"

    def check(self, device: torch.device) -> Check:
        """Whether it built a library, and what to install where it did not."""
        error = self._wait()
        self._folder.cleanup()
        if error:
            return Check(
                name="torch.compile", value=error, status="off", remedy=self._remedy(error)
            )
        # inductor writes C++ for CPUs, Triton for accelerators
        if device.type != "cpu" and find_spec("triton") is None:
            value = f"{self.name} works, but triton is not installed"
            return Check(
                name="torch.compile", value=value, status="off", remedy="pip install triton"
            )
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
        if self._process.returncode == 0:
            return ""
        error_lines = [line for line in text.splitlines() if "error" in line]
        lines = error_lines or text.splitlines() or ["no reason given"]
        return f"{self.name}: {lines[0].strip()[:200]}"

    def _remedy(self, error: str) -> str:
        if "Python.h" in error:
            return "install Python's headers: apt-get install python3-dev"
        if any(sign in error for sign in ("omp.h", "openmp", "-lgomp", "-lomp")):
            return "install OpenMP for this compiler: apt-get install libgomp1 libomp-dev"
        return "install a C++ compiler: apt-get install g++, or name one: export CXX=clang++"


def fast_paths(kind: str | None, compiler: Compiler) -> Iterator[Check]:
    """Devices, backends, attention kernels, the fused optimizer and the compiler, on the device asked for."""
    # a wrong --device is one line of the report; the rest is checked on the CPU
    try:
        device = local_device(kind)
    except ValueError as error:
        remedy = "give a device of this machine, or leave --device out"
        yield Check(
            name="device asked for",
            value=str(error),
            status="missing",
            remedy=remedy,
            required=True,
        )
        device = torch.device("cpu")
    yield devices(device)
    yield from backends(device)
    yield attention(device)
    yield fused_adamw(device)
    yield bfloat16(device)
    # last: it has been compiling beside all of these
    yield compiler.check(device)


def devices(device: torch.device) -> Check:
    """The accelerators of this machine with their memory; free memory only of `device`, whose context exists."""
    if device.type == "cpu":
        return _no_accelerator()
    module = torch.get_device_module(device)
    descriptions = []
    for index in range(torch.accelerator.device_count()):
        if hasattr(module, "get_device_name"):
            name = module.get_device_name(index)
        else:
            name = device.type
        description = f"{device.type}:{index} {name}"
        properties = None
        if hasattr(module, "get_device_properties"):
            properties = module.get_device_properties(index)
        size = getattr(properties, "total_memory", 0)
        if size:
            description += f", {gib(size)}"
        free = 0
        if index == device.index and hasattr(module, "mem_get_info"):
            free, _ = module.mem_get_info(index)
        if free:
            description += f", {gib(free)} free"
        descriptions.append(description)
    return Check(name="device", value="; ".join(descriptions), status="ok")


def _no_accelerator() -> Check:
    device_files = [
        path for path in ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0") if Path(path).exists()
    ]
    if torch.accelerator.is_available():
        return Check(
            name="device", value="cpu, as asked; this machine has an accelerator too", status="info"
        )
    if not device_files:
        return Check(name="device", value="cpu; this machine has no accelerator", status="info")
    value = (
        f"cpu; {device_files[0]} is an accelerator that this torch ({torch.__version__}) cannot use"
    )
    remedy = (
        "install the torch build for it and its driver: https://pytorch.org/get-started/locally"
    )
    return Check(name="device", value=value, status="off", remedy=remedy)


def backends(device: torch.device) -> Iterator[Check]:
    """The backends of torch.distributed: gloo always, and the device's own."""
    available = available_backends()
    device_backend = default_backend(device.type)
    for name in dict.fromkeys(["gloo", device_backend]):
        # reports a failure by itself
        is_plugin = name not in ("gloo", "nccl", "xccl", "none")
        if name in available or is_plugin:
            yield Check(name=name, value="in this torch", status="ok", required=True)
        else:
            remedy = f"install a torch that was built with {name}: https://pytorch.org/get-started"
            yield Check(
                name=name, value="not in this torch", status="missing", remedy=remedy, required=True
            )
    other_names = [name for name in available if name not in ("gloo", device_backend)]
    if other_names:
        yield Check(name="other backends", value=", ".join(other_names), status="info")


def attention(device: torch.device) -> Check:
    """Which kernels of scaled_dot_product_attention work, causal, at the dtype of a run."""
    # mixed precision on accelerators: the kernels differ by dtype
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.ones(1, 2, 16, 64, device=device, dtype=dtype)
    working = []
    failing = []
    reasons = ""
    for name, kernel in KERNELS.items():
        with warnings.catch_warnings(record=True) as messages, sdpa_kernel(kernel):
            warnings.simplefilter("always")
            try:
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
                working.append(name)
            except RuntimeError:  # torch says why in warnings
                failing.append(name)
                texts = [str(message.message).split(" (Triggered")[0] for message in messages]
                reasons = reasons or "; ".join(texts)[:300]
    value = (
        f"{', '.join(working) or 'none'} on {device.type} at {str(dtype).removeprefix('torch.')}"
    )
    if failing:
        value += f"; not there: {', '.join(failing)}"
    disabled = [name for name in ("flash", "mem_efficient", "math") if not _is_enabled(name)]
    if disabled:
        value += f"; switched off: {', '.join(disabled)}"
        remedy = "; ".join(f"torch.backends.cuda.enable_{name}_sdp(True)" for name in disabled)
        return Check(name="attention", value=value, status="off", remedy=remedy)
    # the math kernel alone writes the whole matrix of scores
    if set(working) <= {"math"}:
        remedy = "a torch build for this device has a fused kernel"
        if reasons:
            remedy += f" ({reasons})"
        return Check(name="attention", value=value, status="off", remedy=remedy)
    return Check(name="attention", value=value, status="ok")


def _is_enabled(name: str) -> bool:
    # these switches are for every device, in spite of the module's name
    return bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


def bfloat16(device: torch.device) -> Check:
    """Whether the device multiplies bfloat16 itself."""
    try:
        check_dtype(device, torch.bfloat16)
    except ValueError as error:
        return Check(
            name="bfloat16",
            value=str(error),
            status="off",
            remedy="train in float32, or model.fp16=true",
        )
    note = note_on_bf16(device)
    if note is None:
        return Check(name="bfloat16", value=f"on {device.type}", status="ok")
    return Check(
        name="bfloat16", value=note, status="off", remedy="train in float32 here: model.bf16=false"
    )


def fused_adamw(device: torch.device) -> Check:
    """Whether torch's one-kernel AdamW runs here; optimizers of this project are built on it."""
    params, gradients, first_moments, second_moments = (
        [torch.ones(4, device=device)] for _ in range(4)
    )
    steps = [torch.ones((), device=device)]
    try:
        torch._fused_adamw_(
            params,
            gradients,
            first_moments,
            second_moments,
            [],
            steps,
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        # a backend may have the operation and do nothing
        works = bool((params[0] < 1).all())
    except (RuntimeError, AttributeError) as error:
        value = f"not on {device.type}: {str(error).splitlines()[0][:200]}"
        remedy = "install a torch build with kernels for this device"
        return Check(name="fused AdamW", value=value, status="off", remedy=remedy)
    return Check(name="fused AdamW", value=f"on {device.type}", status="ok" if works else "off")
