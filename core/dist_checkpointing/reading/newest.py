"""The newest of many steps that is whole, although files may be damaged and other jobs remove steps meanwhile."""

import logging
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from core.dist_checkpointing.planning.ranks import DamagedCheckpoint
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot, step_name
from core.dist_checkpointing.publish.manifest import MANIFEST
from core.dist_checkpointing.storage.address import below

log = logging.getLogger(__name__)

_RUN = "run.toml"  # what a run writes into its output

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


def newest_checkpoint(target: str | Path) -> str | None:
    """Where the checkpoint lies that a path or URL names: there, or the newest of a directory of steps, or of a run's
    output, whose run.toml says where its steps are. None: a path that is none of these.

    Raises ValueError: the run kept no checkpoint.
    """
    path = Path(target).expanduser()
    if "://" in str(target):
        steps = CheckpointRoot(str(target)).steps()
        return below(str(target), step_name(steps[-1])) if steps else str(target)
    if (path / MANIFEST).is_file():
        return str(path)
    if (path / _RUN).is_file() or path.suffix == ".toml":
        return _newest_of_run(path if path.suffix == ".toml" else path / _RUN)
    return _newest_step(path)


def _newest_step(path: Path) -> str | None:
    steps = CheckpointRoot(str(path)).steps() if os.path.isdir(path) else []
    return below(str(path), step_name(steps[-1])) if steps else None


def _newest_of_run(path: Path) -> str:
    directory = tomllib.loads(path.read_text()).get("checkpoint", {}).get("directory")
    if directory in (None, "None"):
        raise ValueError(
            f"the run of {path} kept no checkpoint; train it with checkpoint.directory=DIRECTORY"
        )
    saved_in = Path(directory).expanduser()
    # steps may lie beside the run.toml: its own folder is not asked for a run again
    is_output = "://" not in directory and saved_in.absolute() == path.parent.absolute()
    newest = _newest_step(saved_in) if is_output else newest_checkpoint(directory)
    if newest is None:
        raise ValueError(
            f"{directory}, where the run of {path} saves, has no checkpoint; relative paths are of the folder that "
            "the run was started in"
        )
    return newest
