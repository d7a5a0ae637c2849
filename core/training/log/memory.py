"""What a rank holds at fixed points of a run, next to what the formulas say: one aligned line per point."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from core.data_parallel import DataParallel
from core.data_parallel.memory import StateBytes, expected_bytes
from core.optimizer import Offload, ShardedOptimizer
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import Modules, modules_of
from core.testing import LiveBytes

WIDTH = 12
SCALAR = 8  # a storage of at most so many bytes stands for something that is not there


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes on one rank. host: offloaded states. allocated, reserved: the most so far, as the accelerator says."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    activations: int = 0
    buffers: int = 0
    allocated: int = 0
    reserved: int = 0


class MemoryReport:
    """Says a line per point of a run; bytes are of storages, each once, and the least and most over the ranks.

    stages: what this rank holds. shard, optimizer: give them when they are made, by `holds`.
    usages: point -> what every rank had, by rank.
    """

    def __init__(self, stages: Modules, ps: ParallelState, *, say: Callable[[str], None] = print) -> None:
        self.stages, self.ps, self._say = stages, ps, say
        self.shard: DataParallel | None = None
        self.optimizer: ShardedOptimizer | None = None
        self.usages: dict[str, list[Usage]] = {}

    def holds(self, shard: DataParallel | None = None, optimizer: ShardedOptimizer | None = None) -> None:
        """From now on these are counted too."""
        self.shard = shard if shard is not None else self.shard
        self.optimizer = optimizer if optimizer is not None else self.optimizer

    # counting

    def _tensors(self) -> dict[str, list[Tensor]]:
        """kind -> tensors, of which several may share a storage."""
        modules = modules_of(self.stages).values()
        parameters: list[Tensor] = [p for module in modules for p in module.parameters()]
        gradients = [g for p in parameters for g in (p.grad, getattr(p, "main_grad", None)) if g is not None]
        weights = list(parameters)
        for buffer in self.shard.buffers if self.shard is not None else ():
            weights += buffer.memory["weights"]
            gradients += buffer.memory["gradients"]
        buffers = [b for module in modules for b in module.buffers()]
        return {"parameters": weights, "gradients": gradients, "buffers": buffers}

    def here(self, activations: int = 0) -> Usage:
        """This rank's bytes of now; nothing is communicated."""
        seen: set[int] = set()
        found = {kind: _bytes(tensors, seen) for kind, tensors in self._tensors().items()}
        if self.optimizer is not None:
            found["optimizer"], found["host"] = self.optimizer.memory()
        return Usage(**found, activations=activations, **_accelerator(self.ps.device))

    def at(self, point: str) -> list[Usage]:
        """Say what every rank holds. Collective: one all-gather of objects over the world."""
        return self._tell(point, self.here())

    def _tell(self, point: str, usage: Usage) -> list[Usage]:
        usages = all_gather_objects(usage, self.ps.world)
        if not self.usages:
            self._say(self._line("memory, MiB per rank", {name: name for name in self._columns}))
        self.usages[point] = usages
        self._say(self._line(f"after {point}", {name: _range(usages, name) for name in self._columns}))
        return usages

    @property
    def _columns(self) -> list[str]:
        names = [field.name for field in fields(Usage)]
        return names if self.ps.device.type != "cpu" else names[:-2]

    def _line(self, title: str, cells: Mapping[str, str]) -> str:
        return f"{title:<20} | " + " | ".join(f"{cells.get(name, ''):>{WIDTH}}" for name in self._columns)

    # predicting

    def predict(self, offload: Offload | None = None) -> list[StateBytes]:
        """Say what the formulas give for every rank's weights, gradients and states.

        Collective, as `at`. Raises ValueError: no `DataParallel` and sharded optimizer were given to `holds`.
        """
        if self.shard is None or self.optimizer is None:
            raise ValueError(
                "the formulas are of 1 DataParallel and its optimizer, 0 given; call holds(shard, optimizer)"
            )
        mine = expected_of(self.shard, self.optimizer, offload)
        everywhere = all_gather_objects(mine, self.ps.world)
        usages = [
            Usage(parameters=b.weights, gradients=b.gradients, optimizer=b.optimizer, host=b.host) for b in everywhere
        ]
        cells = {name: _range(usages, name) for name in ("parameters", "gradients", "optimizer", "host")}
        self._say(self._line("predicted", cells))
        return everywhere

    # the first step

    def watch(self, executor: Any) -> None:
        """Follow the activations of the next `executor.step` and say two lines after it; later steps cost nothing.

        "first forward": what is kept when the first microbatch has gone through the first stage of this rank.
        "first step": the most that forward and backward held at once beside weights, gradients and states; of
        accelerators without what backward made, which runs in another thread.
        """
        step = executor.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            del executor.step  # once
            seen: list[Usage] = []
            probe = LiveBytes(*self._known(), *(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)))

            def forward_done(module: nn.Module, inputs: Any, output: Any) -> None:
                if not seen and torch.is_grad_enabled():
                    seen.append(self.here(probe.live))

            hooks = [m.register_forward_hook(forward_done) for m in modules_of(self.stages).values()]
            try:
                with probe:
                    result = step(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            self._tell("first forward", seen[0] if seen else self.here())
            self._tell("first step", self.here(probe.peak))
            return result

        executor.step = watched

    def _known(self) -> Iterable[Tensor]:
        return (tensor for tensors in self._tensors().values() for tensor in tensors)


def expected_of(shard: DataParallel, optimizer: ShardedOptimizer, offload: Offload | None = None) -> StateBytes:
    """`expected_bytes` of every bucket, and of parameters that do not train."""
    config = optimizer.config
    frozen = [p for module in modules_of(shard.module).values() for p in module.parameters() if not p.requires_grad]
    parts = [
        expected_bytes(
            buffer.bucket.size,
            zero_stage=shard.zero_stage,
            ranks=buffer.ranks.size if buffer.ranks is not None else 1,
            param_bytes=buffer.dtype.itemsize,
            grad_bytes=buffer.grad_dtype.itemsize,
            main_params=config.main_params,
            moments=len(
                {kind for s in buffer.segments for kind in optimizer.kinds_of(s.name, layout_of(s.parameter))}
            ),
            offload_fraction=offload.fraction if offload is not None else 0.0,
        )
        for buffer in shard.buffers
    ]
    return reduce(add, parts, StateBytes(weights=_bytes([p.detach() for p in frozen], set())))


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Of the storages that are not yet `seen`, in their size of now."""
    total = 0
    for tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():  # ZeRO-3 fetches a freed parameter for who asks
            storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.device.type != "meta":
            seen.add(storage._cdata)
            total += storage.nbytes() if storage.nbytes() > SCALAR else 0
    return total


def _accelerator(device: torch.device) -> dict[str, int]:
    if device.type == "cpu":
        return {}
    return {
        "allocated": torch.accelerator.max_memory_allocated(device),
        "reserved": torch.accelerator.max_memory_reserved(device),
    }


def _range(usages: list[Usage], name: str) -> str:
    """The least and the most, once if they look alike; nothing where there is nothing."""
    values = [asdict(usage)[name] for usage in usages]
    if not any(values):
        return "0"
    low, high = (f"{value / 2**20:.1f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}-{high}"
