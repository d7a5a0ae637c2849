"""One step over one or many stages; loaded at first use, so that pure schedules need no torch."""

from importlib import import_module
from typing import Any

_HOME = {
    "Action": "actions",
    "Costs": "player",
    "LossFn": "step",
    "Pipeline": "pipeline",
    "PipelineError": "failure",
    "Schedule": "actions",
    "StepResult": "step",
    "call_stage": "step",
    "split_microbatches": "step",
    "SingleStage": "single_stage",
    "Timeline": "timeline",
    "get_forward_backward_func": "megatron",
    "looped": "actions",
    "play": "player",
    "v_shape": "actions",
    "stage_backward": "backward",
    "stage_backward_input": "backward",
    "stage_backward_weight": "backward",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
