"""`initialize` called with arguments of `deepspeed.initialize`, of a Trainer, or with fields of a run."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from core.field_names import UnknownName
from core.training.config.messages.names import unknown
from core.training.config.run import known_fields

Call = TypeVar("Call", bound=Callable[..., Any])

_LAYOUT = "leave it out: config.parallel says the layout"
# of deepspeed.initialize
_ANSWERS = {
    "args": "give config=, a path or a mapping of fields",
    "config_params": "give config=",
    "model_parameters": "leave it out: all parameters of the model that want a gradient are trained",
    "optimizer": "give config={'optimizer': {'optimizer': 'adamw', 'lr': ...}}: it is made of the model's shards",
    "lr_scheduler": "give config={'optimizer': {'lr_schedule': ..., 'lr_warmup_steps': ...}}",
    "training_data": "give batches=, or config={'data': {'train': FILE}}",
    "collate_fn": "give batches=, whose batch(step, rank=0, size=1) gives a whole global batch's rows",
    "mpu": _LAYOUT,
    "mesh_param": _LAYOUT,
    "distributed_port": "leave it out: torchrun says it",
    "dist_init_required": "leave it out: torchrun's world is joined where nobody has joined it",
    "criterion": "give loss_fn(output, batch) -> (sum of losses, number of tokens)",
    "loss": "give loss_fn(output, batch) -> (sum of losses, number of tokens)",
}


def answers_theirs(call: Call) -> Call:
    """Decorate `initialize`: an argument that it lacks is an `UnknownName`, with what to give instead."""
    taken = signature(call).parameters

    @wraps(call)
    def told(*values: Any, **arguments: Any) -> Any:
        if theirs := [name for name in arguments if name not in taken]:
            answers = [_ANSWERS.get(name) or _as_field(name) for name in theirs]
            said = "; ".join(f"no {n} ({a})" for n, a in zip(theirs, answers, strict=True))
            raise UnknownName(f"{call.__name__} has {said}")
        return call(*values, **arguments)

    return told  # type: ignore[return-value]


def _as_field(name: str) -> str:
    fields = known_fields()
    if name in {field.section for field in fields.values()}:
        return f"give config={{{name!r}: {{...}}}}"
    same = [field.name for field in fields.values() if field.key == name]
    said = same[0] if len(same) == 1 else ""
    said = said or unknown(name, fields).partition("; ")[2].removeprefix("did you mean ")
    if said.startswith("the parts are"):
        return f"its arguments are model, config, batches, loss_fn; in config {said}"
    return f"in config: {said.rstrip('?')}"
