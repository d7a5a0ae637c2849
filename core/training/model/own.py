"""A model of the user's own in a run: `model.build` names the function that makes it."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from core.models.gpt import GPTModel
from core.parallel_state import ParallelState, layout_of
from core.parallel_state.by_hand import knows_context
from core.parallel_state.random import seeded
from core.pipeline.run.arguments import forward_arguments
from core.training.functions import function_of

_OF_A_BATCH = ("tokens", "labels", "position_ids", "loss_mask", "document_begin", "attention_mask")

if TYPE_CHECKING:
    from core.training.config import RunConfig


def own_stages(run: "RunConfig", tokens: int, ps: ParallelState) -> dict[int, nn.Module]:
    """stage -> module of this rank, as `model.build` made them; drawn from `model.seed`, the same on every rank.

    Raises ValueError: what it returned is no module, or not the stages of this rank.
    """
    name = str(run.model.build)
    ranks = ps.size("pp")
    with seeded(torch.device("cpu"), run.model.seed):
        build = function_of(name)
        _refuse_other_arguments(name, build)
        # with the sizes that nobody gave, which --explain shows
        filled_run = replace(run, model=run.model.with_defaults())
        built = build(filled_run, run.model.vocabulary(tokens), ps)
    modules = dict(built) if isinstance(built, Mapping) else {0: built}
    if strange := [module for module in modules.values() if not isinstance(module, nn.Module)]:
        raise ValueError(
            f"model.build={name} returned a {type(strange[0]).__name__}; return an nn.Module, or {{stage: nn.Module}}"
        )
    placement = run.pipeline.placement(ranks) if ranks > 1 else (0,)
    expected = [stage for stage, rank in enumerate(placement) if rank == ps.index("pp")]
    if sorted(modules) != expected:
        raise ValueError(
            f"model.build={name} returned stages {sorted(modules)}, pipeline rank {ps.index('pp')} of {ranks} holds "
            f"{expected} under schedule={run.pipeline.schedule}; return {{stage: nn.Module}} of these"
        )
    if 0 in modules:
        _refuse_other_inputs(name, modules[0])
    _tell_of_unsplit(modules, f"model.build={name}", ps)
    _tell_of_fp8(modules, name, run.model.fp8)
    for module in modules.values():
        refuse_own_rows(module, f"model.build={name}", ps)
        # a GPTModel was built in its dtype, on its device
        if not isinstance(module, GPTModel):
            module.to(ps.device, run.model.dtype)
    return modules


def _tell_of_unsplit(modules: Mapping[int, nn.Module], origin: str, ps: ParallelState) -> None:
    """Tensor ranks that share no parameter compute the same, each all of it."""
    ranks = ps.size("tp")
    parameters = [p for module in modules.values() for p in module.parameters()]
    if ranks > 1 and parameters and not any("tp" in layout_of(p).split for p in parameters):
        warnings.warn(
            f"{origin}: none of its {len(parameters)} parameters here is split over parallel.tensor={ranks} ranks, "
            "which compute the same, each all of it; build linears with place=Placement.of(parallel) of "
            "core.tensor_parallel, or use parallel.tensor=1",
            stacklevel=2,
        )


def _tell_of_fp8(modules: Mapping[int, nn.Module], name: str, fp8: str | None) -> None:
    """What the run says of FP8 is the function's to read."""
    parts = [part for module in modules.values() for part in module.modules()]
    if fp8 is not None and not any(getattr(part, "fp8", None) is not None for part in parts):
        warnings.warn(
            f"model.fp8={fp8}: 0 of the {len(parts)} modules of model.build={name} multiply in FP8; build parallel "
            "linears with a Placement whose fp8 is set, or leave it out",
            stacklevel=2,
        )


def refuse_own_rows(module: nn.Module, origin: str, ps: ParallelState) -> None:
    """Raise ValueError for a model that would see a context rank's rows as if they were whole sequences."""
    ranks = ps.size("cp")
    if ranks > 1 and not knows_context(module):
        raise ValueError(
            f"{origin}: {type(module).__name__} does not say that it knows parallel.context={ranks} ranks, and would "
            f"see 1/{ranks} of each sequence; use parallel.context=1, or, if it treats rows one by one or through "
            "core.context_parallel, set knows_context = True on its class"
        )


def _refuse_other_arguments(name: str, build: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # of a function that Python has no signature of
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise ValueError(
            f"model.build={name} is called with 3 arguments, (run, vocab_size, parallel), and takes {signature}: "
            f"{error}. Define it so, and return an nn.Module, or {{stage: nn.Module}} of this rank"
        ) from None


def _required_arguments(module: nn.Module) -> list[str]:
    """Names of forward's that have no default; none where Python has no signature of it."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    parameters = inspect.signature(module.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty]


def _refuse_other_inputs(name: str, module: nn.Module) -> None:
    """A first stage that takes nothing that a run's batches hold (nanoGPT's idx and targets), or wants more.

    As Hugging Face's input_ids beside labels.
    """
    taken = forward_arguments(module)
    given = [argument for argument in taken if argument in _OF_A_BATCH]
    wanted = [argument for argument in _required_arguments(module) if argument not in _OF_A_BATCH]
    if not taken or (given and not wanted):
        return
    holds = "none" if not given else f"without a default {', '.join(wanted)}, which is none"
    raise ValueError(
        f"model.build={name} returned a {type(module).__name__} whose forward takes {len(taken)} names "
        f"({', '.join(taken[:4])}), {holds} of a run's batches: tokens and labels [b, s]. Return a module around it "
        "with forward(self, tokens, labels) -> losses [b, s], as F.cross_entropy(logits.flatten(0, 1), "
        "labels.flatten(), reduction='none').view_as(labels)"
    )
