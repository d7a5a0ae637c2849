"""The newest of many steps that is whole, although files may be damaged and other jobs remove steps meanwhile."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from core.dist_checkpointing.planning.ranks import DamagedCheckpoint
from core.dist_checkpointing.publish.checkpoint_root import step_name

log = logging.getLogger(__name__)

# steps that another job may remove while this one reads, before it gives up: that job saves faster than this reads
_MAX_REMOVED_STEPS = 10


def load_newest(
    root: str,
    steps: Sequence[int],
    *,
    list_steps: Callable[[], Sequence[int]],
    load_step: Callable[[int], Any],
) -> tuple[int, Any]:
    """(step, what `load_step(step)` returned) of the newest step that loads; a warning for each newer one.

    steps: ascending, as they were found; `list_steps` looks again. All ranks must get the same from both calls.
    Raises FileNotFoundError: there is no step. DamagedCheckpoint: none loads, with the reason of each.
    """
    problems: dict[int, str] = {}
    while untried := [step for step in steps if step not in problems]:
        step = untried[-1]
        try:
            return step, load_step(step)
        except (DamagedCheckpoint, FileNotFoundError) as error:
            problems[step] = f"step {step}: {error}"
        # a step that is gone was not damaged: another job's retention removed it, after it had saved newer ones
        steps = list_steps()
        if step in steps:
            next_try = "is damaged, falling back to the one before"
        else:
            next_try = "was removed, looking again"
        log.warning("checkpoint %s %s: %s", step_name(step), next_try, problems[step])
        if len(problems.keys() - set(steps)) > _MAX_REMOVED_STEPS:
            break
    if not problems:
        raise FileNotFoundError(
            f"{root} has no checkpoint; start afresh, or look for the right directory"
        )
    details = "\n".join(problems.values())
    raise DamagedCheckpoint(f"none of the {len(problems)} steps in {root} is whole:\n{details}")
