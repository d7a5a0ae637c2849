"""One greppable line per logged step, the same numbers as JSONL and in other sinks; throughput, FLOPs and MFU."""

import math
import re
import resource
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.training.log.json_rows import json_line, json_number, json_rows
from core.training.log.sinks import SCALAR_NAMES, Sink
from core.training.log.validation import (
    REWARDS,
    ValidationRecord,
    best_of,
    read_validations,
    rewards_in_words,
)
from core.transformer import TransformerConfig
from core.transformer.flops import multiplications_per_token
from core.transformer.moe.load import ExpertLoad

# FLOP/s of one device at 16 bits without sparsity, as its maker states it. The first name that a device's name
# contains counts, so longer names stand before their beginnings
PEAK_FLOPS = {
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
_MEASUREMENT_S = 0.1


def flops_per_token(
    config: TransformerConfig, vocab_size: int, sequence_length: int, adapters: int | None = None
) -> int:
    """Matmul FLOPs of forward and backward per token: 6 per multiplication of `multiplications_per_token`.

    adapters: parameters of adapters beside matrices that are frozen and get no gradients; None: all is trained.
    Products that activation checkpointing computes again, and rows that pad the vocabulary, do not count.
    """
    # a multiplication and an addition each in forward, and twice that in backward (input and weight gradients)
    layers, output = multiplications_per_token(config, vocab_size, sequence_length)
    if adapters is None:
        return 6 * (sum(layers) + output)
    # without attention's products
    scores, _ = multiplications_per_token(config, 0, 0)
    matrices = sum(scores) + output
    return 6 * (sum(layers) + output + adapters) - 2 * matrices


def peak_flops(
    device: torch.device, dtype: torch.dtype, given_tflops: float | None = None
) -> float:
    """FLOP/s of one device: what is given (in TFLOP/s), what its maker states for 16 bits, or else a measured matmul.

    The measurement takes about 0.1 s. Raises ValueError: a given figure that is not above 0.
    """
    if given_tflops is not None:
        if not given_tflops > 0:
            raise ValueError(
                f"peak_tflops={given_tflops} must be above 0; leave it out to have it looked up"
            )
        return given_tflops * 1e12
    if device.type != "cpu" and dtype in (torch.bfloat16, torch.float16):
        name = device_name(device)
        is_slice = "MIG" in name  # a part of a device
        for model, peak in PEAK_FLOPS.items():
            # whole words: an A1000 is no A100
            if re.search(rf"\b{re.escape(model)}\b", name) and not is_slice:
                return peak
    return _measure_matmul(device, dtype)


def total_peak_flops(
    ps: ParallelState, dtype: torch.dtype, given_tflops: float | None = None
) -> float:
    """The sum of `peak_flops` of all ranks, measured at the same time: ranks that share cores share their peak.

    Collective: an all-gather of objects over the world. Raises ValueError as `peak_flops`, on every rank.
    """
    local_peak = peak_flops(ps.device, dtype, given_tflops)
    return sum(all_gather_objects(local_peak, ps.world))


def device_name(device: torch.device) -> str:
    """The name that the driver gives a device, "cpu" for the CPU."""
    if device.type == "cpu":
        return "cpu"
    get_device_name = getattr(torch.get_device_module(device), "get_device_name", None)
    if get_device_name is not None:
        return str(get_device_name(device))
    return device.type


@torch.no_grad()
def _measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of as many square products as fit into 0.1 s."""
    size = 512 if device.type == "cpu" else 4096
    a, b = torch.ones(2, size, size, device=device, dtype=dtype)
    out = a @ b  # warm-up: the first product loads libraries
    shortest = math.inf
    end = time.perf_counter() + _MEASUREMENT_S
    while shortest == math.inf or time.perf_counter() < end:
        _wait(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        shortest = min(shortest, time.perf_counter() - begin)
    return 2 * size**3 / shortest


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_mib(device: torch.device) -> float:
    """The most that this process held so far: of an accelerator's tensors, or its resident memory, in MiB."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes there, KiB on Linux
    units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
    return peak / units_per_mib


# what a record says of its layers' experts in one number
OF_ALL_LAYERS = ("expert_load", "aux_loss", "z_loss")


def _mean(values: Sequence[float]) -> float | None:
    if values:
        return sum(values) / len(values)
    return None


def _json_numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: json_number(value) for name, value in row.items()}


def _expert_load(row: dict[str, Any]) -> ExpertLoad:
    field_names = {field.name for field in fields(ExpertLoad)}
    numbers: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, str):
            numbers[name] = float(value)
        else:
            numbers[name] = value
    return ExpertLoad(**{name: value for name, value in numbers.items() if name in field_names})


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged step: its loss (nats per token, or per pair) and tokens of all ranks; rates since the last record.

    mfu: the part of all devices' FLOP/s that the model's own products used, None where no peak is known.
    memory_mib: the most that rank 0 held so far (`memory_mib`). skipped: steps since the last record that changed
    nothing, because a gradient was not finite, or the norm a spike; spikes: the latter. time: seconds since 1970.
    tokens_seen: tokens that the run has read, those before a resume included. experts: of each layer that has some,
    in order, how evenly they were used. rewards: of preferences, means of the step's pairs by TRL's names.

    A new field is filled in `run/loop.py`, printed by `line`, drawn by `log/page.py` and sent on by `log/sinks.py`.
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
    time: float | None = None
    tokens_seen: int | None = None
    experts: tuple[ExpertLoad, ...] = ()
    spikes: int = 0
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def reward_margin(self) -> float | None:
        """How much more the chosen responses gained than the rejected ones; None without preferences."""
        return self.rewards.get("rewards/margins")

    @property
    def reward_accuracy(self) -> float | None:
        """Share of pairs whose chosen response gained more; None without preferences."""
        return self.rewards.get("rewards/accuracies")

    @property
    def expert_load(self) -> float | None:
        """Rows of the busiest expert of all layers over the mean; None without experts."""
        return max((load.busiest for load in self.experts), default=None)

    @property
    def aux_loss(self) -> float | None:
        """The mean of the layers' auxiliary losses: 1 where all experts are used alike; None without them."""
        return _mean([load.aux for load in self.experts if load.aux is not None])

    @property
    def z_loss(self) -> float | None:
        """The mean of the layers' z losses; None without them."""
        return _mean([load.z for load in self.experts if load.z is not None])

    def line(self, total: int) -> str:
        """One line of the console for a step, made to be grepped; a narrow terminal leaves out the last cells."""
        mfu = "" if self.mfu is None else f" | mfu {self.mfu:.1%}"
        rewards = rewards_in_words(self.rewards)
        return (
            f"step {self.step:5d}/{total} | loss {self.loss:.4f}{rewards} | grad norm {self.grad_norm:.4f} | "
            f"lr {self.learning_rate:.2e} | {self.tokens_per_s:,.0f} tokens/s{mfu} | {self.step_ms:.1f} ms/step | "
            f"{self.tflops_per_s:.3g} TFLOP/s{self._experts_in_words()}"
        )

    def _experts_in_words(self) -> str:
        if not self.experts:
            return ""
        busiest = max(self.experts, key=lambda load: load.busiest)
        idlest = min(load.idlest for load in self.experts)
        return f" | expert load {idlest:.2f} to {busiest.busiest:.2f} (layer {busiest.layer})"

    def scalars(self) -> dict[str, float]:
        """Name in TensorBoard and W&B -> value, without what is not known."""
        values = {name: getattr(self, field) for field, name in SCALAR_NAMES.items()}
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        for load in self.experts:
            for name, value in asdict(load).items():
                if name != "layer" and value is not None:
                    numbers[f"experts/layer_{load.layer:03d}_{name}"] = float(value)
        return numbers | {f"train/{name}": value for name, value in self.rewards.items()}

    def to_json(self) -> dict[str, Any]:
        """For JSON: a value that is not finite, which JSON cannot write, becomes "NaN", "Infinity" or "-Infinity"."""
        values = asdict(self) | {name: getattr(self, name) for name in OF_ALL_LAYERS}
        values["experts"] = [_json_numbers(load) for load in values["experts"]]
        values |= values.pop("rewards")
        return _json_numbers(values)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "StepRecord":
        """The inverse; names of other versions are left out. Raises TypeError, ValueError: not a record."""
        known_names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in row.items():
            if name == "experts":
                values[name] = tuple(_expert_load(load) for load in value)
            elif name in known_names:
                values[name] = float(value) if isinstance(value, str) else value
        rewards = {name: float(value) for name, value in row.items() if name.startswith(REWARDS)}
        return cls(**values, rewards=rewards)


class MetricsLog:
    """Appends records to `metrics.jsonl` in a directory; None writes nothing (ranks other than 0).

    start: steps that a resumed run does not make again; their records stay, later ones are dropped.
    sinks: receive each new record too; `close()`, or leaving `with`, closes them.
    run: name of the run, in each row. records: of steps; validations: of the texts that are validated on.
    """

    def __init__(
        self,
        directory: str | Path | None,
        start: int = 0,
        sinks: Sequence[Sink] = (),
        run: str | None = None,
    ) -> None:
        self._of_run = {} if run is None else {"run": run}
        self.records: list[StepRecord] = []
        self.validations: list[ValidationRecord] = []
        self._sinks = tuple(sinks)
        self._path = Path(directory) / "metrics.jsonl" if directory is not None else None
        # a resumed run writes the file anew without the steps that it makes again
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if start and self._path.exists():
                self.records += [
                    record for record in read_metrics(self._path) if record.step <= start
                ]
                self.validations += [
                    record for record in read_validations(self._path) if record.step <= start
                ]
            rows: list[StepRecord | ValidationRecord] = [*self.records, *self.validations]
            rows.sort(key=lambda record: record.step)
            self._path.write_text("".join(map(self._line, rows)))

    def add(self, record: StepRecord) -> None:
        """Remember a step, and append its line at once, so that a killed run still has it."""
        self.records.append(record)
        self._write(record)

    def add_validation(self, record: ValidationRecord) -> ValidationRecord:
        """The same of a validation; the record, with `best` as all of its text so far say."""
        best = best_of(self.validations, record)
        record = replace(record, best=best is None or record.loss < best.loss)
        self.validations.append(record)
        self._write(record)
        return record

    def _line(self, record: StepRecord | ValidationRecord) -> str:
        return json_line(record.to_json() | self._of_run)

    def _write(self, record: StepRecord | ValidationRecord) -> None:
        if self._path is not None:
            try:
                with self._path.open("a") as file:
                    file.write(self._line(record))
            except OSError as error:
                # a full disk of the log must not cost the training, whose checkpoints may lie on another
                warnings.warn(
                    f"{self._path} cannot be written: {error}. The run goes on; from step {record.step} on it keeps "
                    "no records",
                    stacklevel=3,
                )
                self._path = None
        for sink in self._sinks:
            sink.add(record)

    def close(self) -> None:
        """Close the sinks, which write what they have buffered."""
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The steps of a `metrics.jsonl`, also of a run that was killed while it wrote a line."""
    records = []
    for row in json_rows(path):
        try:
            records.append(StepRecord.from_json(row))
        except (ValueError, TypeError):
            # a validation, or a row of another version
            continue
    return records
