"""`training.profile`: some steps of a run in torch's profiler, one trace per rank with a named range per action."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile

from core.parallel_state import ParallelState
from core.training.config import TrainingConfig


class StepProfiler(AbstractContextManager):
    """Profiles the steps that `config.profile` names; `before(step)` goes before each. Without it does nothing.

    Every rank writes `profile/rank-00000.json` under `config.output`, in Chrome's format (ui.perfetto.dev,
    chrome://tracing). With `profile_nvtx` no file: ranges go to a profiler around the process (nsys).
    Raises ValueError: NVTX on another device than CUDA.
    """

    def __init__(
        self, config: TrainingConfig, ps: ParallelState, say: Callable[[str], None]
    ) -> None:
        if config.profile_nvtx and ps.device.type != "cuda":
            raise ValueError(
                f"profile_nvtx needs CUDA, this rank's device is {ps.device.type}; leave it out for traces in files"
            )
        self._start, self._stop = config.profiled_steps or (0, 0)
        self._nvtx = config.profile_nvtx
        self._directory = Path(config.output) / "profile"
        self._ps = ps
        self._say = say
        self._profiler = None

    _profiler: Any

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def before(self, step: int) -> None:
        """Step number `step`, from 0, is about to begin: start or end the profile where it is time."""
        if step >= self._stop:
            self._end()
        elif step >= self._start and self._profiler is None:
            if self._nvtx:
                self._profiler = emit_nvtx()
            else:
                self._profiler = profile(activities=_activities(self._ps.device))
            self._profiler.__enter__()

    def _end(self) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        if self._ps.device.type != "cpu":
            # kernels that were started in the last step belong to the profile
            torch.accelerator.synchronize(self._ps.device)
        profiler.__exit__(None, None, None)
        if self._nvtx:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank-{self._ps.rank:05d}.json"
        profiler.export_chrome_trace(str(path))
        self._say(
            f"profile of steps {self._start} to {self._stop - 1}: {self._directory} (open in ui.perfetto.dev)"
        )


def _activities(device: torch.device) -> list[ProfilerActivity]:
    kinds = {
        "cuda": ProfilerActivity.CUDA,
        "xpu": ProfilerActivity.XPU,
        "mtia": ProfilerActivity.MTIA,
    }
    return [ProfilerActivity.CPU, *([kinds[device.type]] if device.type in kinds else [])]
