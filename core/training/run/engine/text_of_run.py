"""Whether `initialize` reads the text of a run: for a GPT, and for modules that take what its batches hold."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from core.models.gpt import GPTModel
from core.pipeline import LossFn
from core.pipeline.run.arguments import forward_arguments
from core.training.config import RunConfig
from core.training.run.evaluate import next_token_loss


def reads_text(
    run: RunConfig,
    model: nn.Module | Mapping[int, nn.Module] | None,
    batches: Any,
    loss_fn: LossFn | None,
) -> bool:
    """The same on every rank.

    Raises ValueError: `data.train` is set beside a module that cannot take its batches; two losses for one run.
    """
    if run.training.objective == "dpo" and loss_fn not in (None, next_token_loss):
        raise ValueError(
            "initialize was given a loss_fn, and training.objective=dpo is another: 2 losses for one run; leave one "
            "of them out"
        )
    if batches is not None:
        return False
    modules = list(model.values()) if isinstance(model, Mapping) else [model]
    if model is None or all(isinstance(module, GPTModel) for module in modules):
        return True
    # pairs are of a GPT, which `assemble` tells
    if not run.data.train or run.training.objective == "dpo":
        return False
    # of stages only the first takes tokens: one that does not is told when it is called
    if isinstance(model, nn.Module):
        _refuse_other_inputs(model, loss_fn)
    return True


def _refuse_other_inputs(module: nn.Module, loss_fn: LossFn | None) -> None:
    taken = forward_arguments(module)
    name = type(module).__name__
    needed = ["tokens", *["labels"] * (loss_fn is next_token_loss)]
    missing = [argument for argument in needed if argument not in taken]
    if not missing:
        return
    problem = (
        f"data.train is read as batches of tokens and labels [b, s], and forward of {name} takes no "
        f"{' and no '.join(missing)} among its {len(taken)} arguments ({', '.join(taken[:4])}"
        f"{', ...' * (len(taken) > 4)})"
    )
    if missing == ["labels"]:
        raise ValueError(
            f"{problem}, from which it gives losses [b, s]; take them, or give loss_fn(output, batch) -> (sum of "
            "losses, number of tokens)"
        )
    remedy = "give batches=, whose batch(step, rank=0, size=1) gives its inputs by name; or leave data.train out"
    if "input_ids" in taken:
        remedy = (
            "for a model of Hugging Face's leave the module out and set model.huggingface to its folder; or "
            f"{remedy.replace('its inputs by name', 'input_ids and labels')}"
        )
    raise ValueError(f"{problem}; {remedy}")
