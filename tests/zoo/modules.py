"""Other people's modules as stages of a pipeline, under schedules and recomputation."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.parallel_state import ParallelState
from core.pipeline import Pipeline
from core.pipeline.run.step import stage_seed
from tests.states import state as parallel_state
from tests.zoo.case import Case, Family, Pairs, compared, grads, observe
from tests.zoo.modules_hf import HF
from tests.zoo.modules_hooks import HOOKS
from tests.zoo.modules_odd import ODD
from tests.zoo.modules_parts import Block, Chain, D, call
from tests.zoo.modules_plain import PLAIN

MICROBATCHES, ROWS, LENGTH = 4, 8, 5
SCHEDULES, POLICIES = ("1f1b", "zb-v", "auto"), ("none", "layer", "stage")
VARIATIONS = tuple(f"{schedule}, {policy}" for schedule in SCHEDULES for policy in POLICIES)


def squares(output: Any, microbatch: Any) -> tuple[Tensor, int]:
    """A loss of any output."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    return sum(t.square().sum() for t in tensors), len(tensors[0])  # type: ignore[return-value]


def batch(step: int, kind: str) -> Tensor:
    """Numbers or tokens."""
    generator = torch.Generator().manual_seed(step)
    if kind == "tokens":
        return torch.randint(0, 16, (ROWS, LENGTH), generator=generator)
    return torch.randn(ROWS, LENGTH, D, generator=generator, dtype=torch.float64)


def made(make: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    """The stages, the same at every call."""
    torch.manual_seed(0)
    return [Chain([Block(module)]) for module in make()]


def plain(stages: list[nn.Module], steps: int, kind: str, loss_fn: Callable) -> None:
    """The training loop of one process; random numbers as the pipeline draws them."""
    for step in range(steps):
        for m, part in enumerate(batch(step, kind).chunk(MICROBATCHES)):
            x = part
            for s, stage in enumerate(stages):
                torch.manual_seed(stage_seed(0, step, m, s))
                x = call(stage, x)
            loss_fn(x, part)[0].backward()


def state(stages: list[nn.Module]) -> dict[str, Any]:
    """Gradients and buffers of all stages."""
    whole = nn.ModuleList(stages)
    return {**grads(whole), **dict(whole.named_buffers())}


def run(
    variation: str, make: Callable[[], list[nn.Module]], kind: str = "numbers", loss_fn: Callable = squares
) -> Pairs:
    """Train under one schedule and policy, and in a plain loop."""
    schedule, policy = variation.split(", ")
    steps = 3 if schedule == "auto" else 2
    ours, theirs = made(make), made(make)
    if schedule == "1f1b":
        ours, theirs = [Chain(list(ours))], [Chain(list(theirs))]
    recompute: Any = [[Block]] * len(ours) if policy == "layer" else policy
    before = torch.get_rng_state()
    pipe = Pipeline(
        ours, ps=ParallelState.single("cpu"), schedule=schedule, num_microbatches=MICROBATCHES, recompute=recompute
    )
    try:
        for step in range(steps):
            pipe.step(batch(step, kind), loss_fn)
    finally:
        pipe.close()
    torch.set_rng_state(before)
    plain(theirs, steps, kind, loss_fn)
    return compared(state(ours), state(theirs))


def run_apart(what: str, policy: str, schedule: str = "1f1b") -> Pairs:
    """The same with one stage on each of two ranks; this rank's gradients and buffers."""
    how = next(case for case in FAMILY.cases if case.what == what).run.keywords  # type: ignore[attr-defined]
    make, kind, loss_fn = how["make"], how.get("kind", "numbers"), how.get("loss_fn", squares)
    ours, theirs = made(make), made(make)
    ps = parallel_state(pp=2)
    mine = ours[ps.index("pp")]
    recompute: Any = [[Block]] * 2 if policy == "layer" else policy
    pipe = Pipeline([mine], ps=ps, schedule=schedule, num_microbatches=MICROBATCHES, recompute=recompute)
    before = torch.get_rng_state()
    for step in range(2):
        pipe.step(batch(step, kind), loss_fn)
    pipe.close()
    torch.set_rng_state(before)
    plain(theirs, 2, kind, loss_fn)
    return compared(state([mine]), state([theirs[ps.index("pp")]]))


def seen_apart(names: Sequence[str], policies: Sequence[str]) -> dict[str, str]:
    """What was not right on this rank."""
    found = {f"{what}, {policy}": observe(run_apart, what, policy) for what in names for policy in policies}
    return {name: f"{seen.outcome}: {seen.message}" for name, seen in found.items() if seen.outcome != "right"}


def _case(what: str, facts: Any) -> Case:
    facts = facts if isinstance(facts, Mapping) else {"make": facts}
    how = {name: facts[name] for name in ("make", "kind", "loss_fn") if name in facts}
    told = {name: facts[name] for name in ("outcome", "says", "remedy", "elsewhere") if name in facts}
    return Case(what, partial(run, **how), **told)


FAMILY = Family(
    "Modules as stages",
    "Two stages of each, trained under "
    f"{' and '.join((', '.join(SCHEDULES[:-1]), SCHEDULES[-1]))} with recompute={', '.join(POLICIES)}; gradients and "
    "buffers are those of a plain loop.",
    [_case(what, facts) for what, facts in {**PLAIN, **ODD, **HOOKS, **HF}.items()],
    VARIATIONS,
)
