"""One habit, module, tool or file of somebody else's, what comes of it, and how that is judged.

right: the numbers of one process, or of torch's own tool, in float64, and not a word. told: one message at first
use that names the remedy. refused: an exception that names the remedy, before anything moved. Whatever is none of
these is *silently wrong*, and no case may state it.
"""

import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-10  # of the largest value of the reference, in float64

# what a case returns: name -> (ours, the reference); names are for the message only
Pairs = Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Case:
    """`run(...)` does what the user does and returns (ours, reference) pairs; a family says with which arguments.

    what: the habit in the user's words, unique in its family: a row of docs/compatibility.md. outcome: "right",
    "told" or "refused". says: a regular expression that the message must match. remedy: for the table.
    elsewhere: variation -> (outcome, says), where a variation (a ZeRO stage, a schedule, ...) differs from the rest.
    """

    what: str
    run: Callable[..., Pairs]
    outcome: str = "right"
    says: str = ""
    remedy: str = ""
    elsewhere: Mapping[Any, tuple[str, str]] = field(default_factory=dict)

    def expected(self, variation: Any = None) -> tuple[str, str]:
        """(outcome, says) under a variation."""
        return self.elsewhere.get(variation, (self.outcome, self.says))


@dataclass(frozen=True)
class Seen:
    """What one rank saw; plain strings and numbers, to be sent between processes."""

    outcome: str
    message: str = ""
    trace: str = ""


def worst(pairs: Pairs) -> tuple[float, str]:
    """The largest difference, relative to the largest value of its reference, and where."""
    found = (0.0, "")
    for name, (got, want) in pairs.items():
        got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
        if got.shape != want.shape:
            return float("inf"), f"{name}: shape {tuple(got.shape)} for {tuple(want.shape)}"
        if want.numel() == 0:
            continue
        if want.dtype == torch.bool or not (want.is_floating_point() or want.is_complex()):
            error = 0.0 if torch.equal(got, want) else float("inf")
        elif not (torch.isfinite(got) == torch.isfinite(want)).all():
            error = float("inf")
        else:
            error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        if error > found[0]:
            found = (error, name)
    return found


def observe(run: Callable[..., Pairs], *args: Any, tolerance: float = TOLERANCE, **kwargs: Any) -> Seen:
    """Run a case on this rank and say what came of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pairs = run(*args, **kwargs)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            text = "\n".join([f"{type(error).__name__}: {error}", *notes])
            return Seen("refused", text, traceback.format_exc())
    told = [str(w.message) for w in caught if not issubclass(w.category, (DeprecationWarning, FutureWarning))]
    if told:
        return Seen("told", "\n".join(told))
    assert pairs, "the case compares nothing"
    error, where = worst(pairs)
    return Seen("right") if error <= tolerance else Seen("silently wrong", f"{where}: off by {error:.1e}")


def judge(case: Case, seen: Iterable[Seen], variation: Any = None) -> None:
    """Raise AssertionError unless every rank saw what the case states."""
    outcome, says = case.expected(variation)
    assert outcome in ("right", "told", "refused"), outcome
    assert outcome == "right" or says, f"{case.what}: state what the message says"
    for rank, one in enumerate(seen):
        assert one.outcome == outcome, (
            f"{case.what} ({variation}), rank {rank}: {one.outcome}, not {outcome}\n{one.message}\n{one.trace}"
        )
        assert re.search(says, one.message), (
            f"{case.what} ({variation}), rank {rank} does not say {says!r}:\n{one.message}"
        )


def grads(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The gradients of a module by name, `main_grad` where there is one."""
    return {
        name: getattr(p, "main_grad", None) if getattr(p, "main_grad", None) is not None else p.grad
        for name, p in module.named_parameters()
    }


def compared(got: Mapping[str, Any], want: Mapping[str, Any]) -> Pairs:
    """Pairs of two mappings that must hold the same names; a gradient that is None is zero."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())

    def whole(value: Any, other: Any) -> Any:
        if value is not None:
            return value
        return torch.zeros_like(other) if isinstance(other, Tensor) else torch.zeros(())

    return {name: (whole(got[name], want[name]), whole(want[name], got[name])) for name in got}


@dataclass(frozen=True)
class Family:
    """Cases that are run alike: a section of docs/compatibility.md."""

    title: str
    text: str  # under which variations, compared with what
    cases: Sequence[Case]
    variations: Sequence[Any] = (None,)
