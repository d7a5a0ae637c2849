"""One step over one or many stages; loaded at first use, so that pure schedules need no torch."""

from importlib import import_module
from typing import Any

_HOME = {
    "Action": "schedule.actions",
    "Costs": "schedule.player",
    "LossFn": "run.step",
    "Pipeline": "run.pipeline",
    "PipelineError": "run.failure",
    "Schedule": "schedule.actions",
    "StepResult": "run.step",
    "call_stage": "run.step",
    "split_microbatches": "run.step",
    "SingleStage": "run.single_stage",
    "Timeline": "schedule.timeline",
    "get_forward_backward_func": "run.megatron",
    "looped": "schedule.actions",
    "play": "schedule.player",
    "v_shape": "schedule.actions",
    "stage_backward": "run.backward",
    "stage_backward_input": "run.backward",
    "stage_backward_weight": "run.backward",
}


def __getattr__(name: str) -> Any:
    if name == "schedules":  # the module, where a user's `from core.pipeline import schedules` finds it
        return import_module(f"{__name__}.schedule.schedules")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "schedules"])
