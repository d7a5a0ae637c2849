"""Bytes that each rank holds at fixed points of a run, next to what the formulas predict: one line per point."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from core.data_parallel import DataParallel
from core.data_parallel.buffers.gradient import BucketGradient
from core.data_parallel.memory import StateBytes, expected_bytes
from core.optimizer import Offload, ShardedOptimizer
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.modules import Modules, modules_of
from core.testing import LiveBytes

COLUMN_WIDTH = 9
TITLE_WIDTH = 14
COLUMNS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "allocated",
    "reserved",
    "host",
    "buffers",
)
# ZeRO-3 leaves a storage of at most so many bytes for a freed parameter
PLACEHOLDER_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes on one rank. host: offloaded states. activations: None where they cannot be seen (compiled layers).
    allocated, reserved: peaks that the accelerator counts."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    activations: int | None = 0
    buffers: int = 0
    allocated: int = 0
    reserved: int = 0


class MemoryReport:
    """Prints a line per point of a run: bytes of storages, each counted once, the smallest and largest of all ranks.

    stages: the modules of this rank. shard, optimizer: given by `holds` once they exist.
    usages: point -> the bytes of every rank, by rank.
    """

    def __init__(
        self, stages: Modules, ps: ParallelState, *, say: Callable[[str], None] = print
    ) -> None:
        self.stages = stages
        self.ps = ps
        self._say = say
        self.shard: DataParallel | None = None
        self.optimizer: ShardedOptimizer | None = None
        self.usages: dict[str, list[Usage]] = {}

    def holds(
        self, shard: DataParallel | None = None, optimizer: ShardedOptimizer | None = None
    ) -> None:
        """From now on these are counted too."""
        if shard is not None:
            self.shard = shard
        if optimizer is not None:
            self.optimizer = optimizer

    # --- counting ---

    def _tensors(self) -> dict[str, list[Tensor]]:
        """kind -> tensors, of which several may share a storage."""
        weights: list[Tensor] = []
        buffers: list[Tensor] = []
        for module in modules_of(self.stages).values():
            weights += module.parameters()
            buffers += module.buffers()
        maybe_gradients: list[Tensor | None] = []
        for parameter in weights:
            maybe_gradients += [parameter.grad, getattr(parameter, "main_grad", None)]
        # one that lies in the buckets says bytes that it does not have
        without_memory = (type(None), BucketGradient)
        gradients = [
            gradient for gradient in maybe_gradients if not isinstance(gradient, without_memory)
        ]
        if self.shard is not None:
            for flat_buffer in self.shard.buffers:
                # views of one bucket share its storage, which is counted once
                weights += flat_buffer.memory["weights"]
                gradients += flat_buffer.memory["gradients"]
        return {"parameters": weights, "gradients": gradients, "buffers": buffers}

    def local_usage(self, activations: int | None = 0) -> Usage:
        """This rank's bytes at this moment; nothing is communicated."""
        # storages: one that two kinds share belongs to the first
        counted: set[int] = set()
        sizes = {
            kind: _uncounted_bytes(tensors, counted) for kind, tensors in self._tensors().items()
        }
        if self.optimizer is not None:
            sizes["optimizer"], sizes["host"] = self.optimizer.memory()
        return Usage(**sizes, activations=activations, **_accelerator(self.ps.device))

    def at(self, point: str) -> list[Usage]:
        """Print what every rank holds. Collective: one all-gather of objects over the world."""
        return self._report(point, self.local_usage())

    def _report(self, point: str, usage: Usage) -> list[Usage]:
        # the table's head comes with the first line
        usages = all_gather_objects(usage, self.ps.world)
        if not self.usages:
            self._say(self._line("MiB per rank", {name: name for name in self._columns}))
        self.usages[point] = usages
        self._say(self._line(point, {name: _range_in_mib(usages, name) for name in self._columns}))
        return usages

    @property
    def _columns(self) -> list[str]:
        if self.ps.device.type == "cpu":
            return [name for name in COLUMNS if name not in ("allocated", "reserved")]
        return list(COLUMNS)

    def _line(self, title: str, cells: Mapping[str, str]) -> str:
        columns = [
            f"{cells.get(name, ''):>{max(COLUMN_WIDTH, len(name))}}" for name in self._columns
        ]
        return f"{title:<{TITLE_WIDTH}} | " + " | ".join(columns)

    # --- predicting ---

    def predict(self, offload: Offload | None = None) -> list[StateBytes]:
        """Print what the formulas predict for every rank's weights, gradients and optimizer states.

        Collective, as `at`. Raises ValueError: no `DataParallel` and sharded optimizer were given to `holds`.
        """
        if self.shard is None or self.optimizer is None:
            raise ValueError(
                "the formulas are of 1 DataParallel and its optimizer, 0 given; call holds(shard, optimizer)"
            )
        local_bytes = expected_of(self.shard, self.optimizer, offload)
        per_rank = all_gather_objects(local_bytes, self.ps.world)
        usages = []
        for state in per_rank:
            usage = Usage(
                parameters=state.weights,
                gradients=state.gradients,
                optimizer=state.optimizer,
                host=state.host,
            )
            usages.append(usage)
        cells = {
            name: _range_in_mib(usages, name)
            for name in ("parameters", "gradients", "optimizer", "host")
        }
        self._say(self._line("predicted", cells))
        return per_rank

    # --- the first step ---

    def watch(self, executor: Any, *, compiled: bool = False) -> None:
        """Follow the activations of the next `executor.step` and print two lines after it; later steps cost nothing.

        "first forward": the activations when the first microbatch has gone through the first stage of this rank.
        "first step": the most that forward and backward held at once beside weights, gradients and states; of
        accelerators without what backward made, which runs in another thread.
        compiled: layers run as compiled code, whose tensors no dispatch mode sees; torch compiles nothing inside of
        one. Their activations are told as "-".
        """
        step = executor.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            del executor.step  # only the first step is watched
            after_forward: list[Usage] = []
            batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            # what exists already is no activation
            probe = None if compiled else LiveBytes(*self._counted_tensors(), *batch)

            def forward_done(module: nn.Module, inputs: Any, output: Any) -> None:
                if not after_forward and torch.is_grad_enabled():
                    after_forward.append(self.local_usage(probe.live if probe else None))

            modules = modules_of(self.stages).values()
            hooks = [module.register_forward_hook(forward_done) for module in modules]
            try:
                with probe or nullcontext():
                    result = step(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            self._report("first forward", after_forward[0] if after_forward else self.local_usage())
            self._report("first step", self.local_usage(probe.peak if probe else None))
            return result

        executor.step = watched

    def _counted_tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(self._tensors().values())


def expected_of(
    shard: DataParallel, optimizer: ShardedOptimizer, offload: Offload | None = None
) -> StateBytes:
    """`expected_bytes` of every bucket, and of parameters that do not train."""
    config = optimizer.config
    parameters: list[Tensor] = []
    for module in modules_of(shard.module).values():
        parameters += module.parameters()
    frozen = [parameter.detach() for parameter in parameters if not parameter.requires_grad]
    total = StateBytes(weights=_uncounted_bytes(frozen, set()), optimizer=optimizer.whole_bytes)
    for buffer in shard.buffers:
        total += expected_bytes(
            buffer.bucket.size,
            zero_stage=shard.zero_stage,
            ranks=buffer.ranks.size if buffer.ranks is not None else 1,
            param_bytes=buffer.dtype.itemsize,
            grad_bytes=buffer.grad_dtype.itemsize,
            main_params=config.main_params,
            moments=optimizer.moments_of(buffer),
            offload_fraction=offload.fraction if offload is not None else 0.0,
        )
    return total


def _uncounted_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Bytes of the storages that are not `counted` yet, which are added to it."""
    total = 0
    for tensor in tensors:
        # otherwise ZeRO-3 would gather a freed parameter
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        if storage._cdata in counted or storage.device.type == "meta":
            continue
        counted.add(storage._cdata)
        if storage.nbytes() > PLACEHOLDER_BYTES:
            total += storage.nbytes()
    return total


def _accelerator(device: torch.device) -> dict[str, int]:
    if device.type == "cpu":
        return {}
    return {
        "allocated": torch.accelerator.max_memory_allocated(device),
        "reserved": torch.accelerator.max_memory_reserved(device),
    }


def _short(mib: float) -> str:
    if mib < 100:
        return f"{mib:.1f}"
    return f"{mib:.0f}"


def _range_in_mib(usages: list[Usage], name: str) -> str:
    """`smallest-largest` in MiB, one number if both look alike."""
    values = [asdict(usage)[name] for usage in usages]
    if None in values:
        return "-"
    if not any(values):
        return "0"
    low = _short(min(values) / 2**20)
    high = _short(max(values) / 2**20)
    if low == high:
        return low
    return f"{low}-{high}"
