"""One greppable line per logged step, the same facts as JSONL and in other sinks, and the model's FLOPs."""

import json
import math
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.training.log.sinks import Sink
from core.transformer import TransformerConfig
from core.transformer.flops import multiplications_per_token

# FLOP/s of one device at 16 bits without sparsity, as its maker states it; the first name found in a device's counts
PEAKS = {
    "GB200": 2450e12,
    "B200": 2250e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI355X": 2500e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # of one of its two dies, which is a device
}
_MEASURED_S = 0.1


def flops_per_token(config: TransformerConfig, vocab_size: int, sequence_length: int) -> int:
    """Matmul FLOPs of forward and backward per token: 6 per multiplication of `multiplications_per_token`.

    What is computed again (activation checkpointing) and rows that pad the vocabulary do not count.
    """
    layer, output = multiplications_per_token(config, vocab_size, sequence_length)
    return 6 * (config.num_layers * layer + output)


def peak_flops(device: torch.device, dtype: torch.dtype, given_tflops: float | None = None) -> float:
    """FLOP/s of one device: what is given (in TFLOP/s), what its maker states for 16 bits, or else a measured matmul.

    The measurement takes about 0.1 s. Raises ValueError: a given figure that is not above 0.
    """
    if given_tflops is not None:
        if not given_tflops > 0:
            raise ValueError(f"peak_tflops={given_tflops} must be above 0; leave it out to have it looked up")
        return given_tflops * 1e12
    if device.type != "cpu" and dtype in (torch.bfloat16, torch.float16):
        name = device_name(device)
        # whole words: an A1000 is no A100; and a slice of a device (MIG) is not the device
        known = [
            peak for part, peak in PEAKS.items() if re.search(rf"\b{re.escape(part)}\b", name) and "MIG" not in name
        ]
        if known:
            return known[0]
    return _measured(device, dtype)


def total_peak_flops(ps: ParallelState, dtype: torch.dtype, given_tflops: float | None = None) -> float:
    """The sum of `peak_flops` of all ranks, measured at the same time: ranks that share cores share their peak.

    Collective: an all-gather of objects over the world. Raises ValueError as `peak_flops`, on every rank.
    """
    return sum(all_gather_objects(peak_flops(ps.device, dtype, given_tflops), ps.world))


def device_name(device: torch.device) -> str:
    """As its driver calls it, "cpu" for the CPU."""
    if device.type == "cpu":
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device)) if name is not None else device.type


@torch.no_grad()
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """The best of as many products as fit into 0.1 s."""
    n = 512 if device.type == "cpu" else 4096
    a, b = torch.ones(2, n, n, device=device, dtype=dtype)
    out = a @ b  # the first one loads libraries
    best, end = math.inf, time.perf_counter() + _MEASURED_S
    while best == math.inf or time.perf_counter() < end:
        _wait(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_mib(device: torch.device) -> float:
    """The most that this process held so far: of an accelerator's tensors, or its resident memory, in MiB."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 2**20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged step: its loss (nats per token) and tokens of all ranks; rates since the last record.

    mfu: the part of all devices' FLOP/s that the model's own products used, None where no peak is known.
    memory_mib: the most that rank 0 held so far (`memory_mib`). skipped: steps since the last record that changed
    nothing, because a gradient was not finite.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    tflops_per_s: float
    step_ms: float
    tokens: int
    mfu: float | None = None
    memory_mib: float | None = None
    skipped: int = 0

    def line(self, total: int) -> str:
        """One line of the console for a step, made to be grepped."""
        return (
            f"step {self.step:5d}/{total} | loss {self.loss:.4f} | grad norm {self.grad_norm:.4f} | "
            f"lr {self.learning_rate:.2e} | {self.tokens_per_s:,.0f} tokens/s | {self.tflops_per_s:.4f} TFLOP/s | "
            f"{self.step_ms:.1f} ms/step{'' if self.mfu is None else f' | mfu {self.mfu:.1%}'}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON has it: what is not finite becomes "NaN", "Infinity" or "-Infinity", which JSON cannot write."""
        return {name: json_number(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "StepRecord":
        """The inverse; names of other versions are left out. Raises TypeError, ValueError: not a record."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: value for name, value in row.items() if name in known}
        values |= {name: float(value) for name, value in values.items() if isinstance(value, str)}
        return cls(**values)


def json_number(value: Any) -> Any:
    """A float that JSON cannot write as a word that float() and JavaScript's Number() read; others as they are."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class MetricsLog:
    """Appends records to `metrics.jsonl` in a directory; None writes nothing (ranks other than 0).

    start: steps that a resumed run does not make again; their records stay, later ones are dropped.
    sinks: who else is told of each new record; `close()`, or leaving `with`, closes them.
    """

    def __init__(self, directory: str | Path | None, start: int = 0, sinks: Sequence[Sink] = ()) -> None:
        self.records: list[StepRecord] = []
        self._sinks = tuple(sinks)
        self._path = Path(directory) / "metrics.jsonl" if directory is not None else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [r for r in read_metrics(self._path) if r.step <= start] if start and self._path.exists() else []
            self._path.write_text("".join(_line(record) for record in kept))
            self.records += kept

    def add(self, record: StepRecord) -> None:
        """Keep it, and append its line at once, so that a killed run still has it."""
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as f:
                f.write(_line(record))
        for sink in self._sinks:
            sink.add(record)

    def close(self) -> None:
        """Close the sinks; what they were told is written."""
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _line(record: StepRecord) -> str:
    return json.dumps(record.to_json(), allow_nan=False) + "\n"


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The records of a `metrics.jsonl`, also of a run that was killed while it wrote a line."""
    found = []
    for line in Path(path).read_text(errors="replace").splitlines():
        try:
            found.append(StepRecord.from_json(json.loads(line)))
        except (ValueError, TypeError, AttributeError):  # a line that was never finished
            continue
    return found
