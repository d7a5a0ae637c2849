"""torch's AdamW in the place of one of `core.optimizer`, or the other way: moments lie alike, counts do not.

torch's has a `step` per parameter and its options under `param_groups`; ours one `step_count`, and who is behind it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from core.dist_checkpointing.format.keys import key_of
from core.dist_checkpointing.reading.read import read, torch_dtype
from core.dist_checkpointing.reading.stored import StoredCheckpoint
from core.dist_checkpointing.reading.values import decoded
from core.dist_checkpointing.state.optimizers import GROUPS
from core.parallel_state.flat import whole

# the moments of Adam, by the names that both kinds of optimizers give them
MOMENTS = ("exp_avg", "exp_avg_sq")
RATES = ("lr", "initial_lr")
COUNT, SKIPPED = "step_count", "skipped_steps"


class TorchCounts(NamedTuple):
    """What an optimizer of ours is told in the place of counts that only torch's has.

    values: key -> value. sources: key -> the keys of the checkpoint that it is made of, escaped as paths.
    """

    values: dict[str, Any]
    sources: dict[str, list[str]]


def counts_of_torch(keys: Iterable[str], stored: StoredCheckpoint) -> TorchCounts:
    """Counts for an optimizer of ours whose states in the checkpoint are those of torch's AdamW. Reads its steps.

    keys: of the values that are loaded. Raises ValueError: layers of one stack with different counts.
    """
    found = TorchCounts({}, {})
    for key in keys:
        path, _, name = key.rpartition("/")
        if name != COUNT or not path or key in stored.objects:
            continue
        groups = [other for other in stored.objects if other.startswith(f"{path}/{GROUPS}/")]
        steps = _steps_of_torch(f"{path}/step/", stored)
        if not groups or not steps:
            continue
        most = max(steps.values())
        behind = {name: most - count for name, count in steps.items() if count < most}
        found.values[key] = {"steps": most, "behind": behind, "rates": _rates(groups, path, stored)}
        found.values[f"{path}/{SKIPPED}"] = 0
        arrays = [other for other in stored.metadata if key_of(other).startswith(f"{path}/step/")]
        values = [other for other in stored.objects if other.startswith(f"{path}/step/")]
        found.sources[key] = [*groups, *arrays, *values]
        found.sources[f"{path}/{SKIPPED}"] = []
    return found


def _rates(groups: Iterable[str], path: str, stored: StoredCheckpoint) -> dict[str, Any]:
    """Name of a parameter -> its rates, where a scheduler of torch's had set them; others a program states anew."""
    rates = {}
    for key in groups:
        options = decoded(stored, key)
        if "initial_lr" in options:
            name = key.removeprefix(f"{path}/{GROUPS}/")
            rates[name] = {rate: options[rate] for rate in RATES}
    return rates


def _steps_of_torch(prefix: str, stored: StoredCheckpoint) -> dict[str, int]:
    """Name of a parameter, or of a stack of them -> its count of updates."""
    counts = {}
    for key in stored.objects:
        if key.startswith(prefix):
            counts[key.removeprefix(prefix)] = int(decoded(stored, key))
    arrays = {}
    for key in stored.metadata:
        if key_of(key).startswith(prefix):
            shape = stored.shape(key)
            arrays[key] = (whole(shape), torch.zeros(shape, dtype=torch_dtype(stored.dtype(key))))
    read(stored, {key: [target] for key, target in arrays.items()})
    for key, (_, tensor) in arrays.items():
        different = sorted({int(count) for count in tensor.flatten().tolist()})
        if len(different) > 1:
            raise ValueError(
                f"{stored.directory.url}: {key}: layers of this stack have made {different} updates of torch's "
                "AdamW, which an optimizer of core.optimizer cannot take over; go on with torch's"
            )
        counts[key_of(key).removeprefix(prefix)] = different[0]
    return counts


class OurCounts(NamedTuple):
    """Of an optimizer of ours: updates, parameter -> how many of them left it out, rates that a scheduler had set."""

    updates: int
    behind: Mapping[str, int]
    rates: Mapping[str, float]


def counts_of_ours(path: str, stored: StoredCheckpoint) -> OurCounts | None:
    """None: the states there are no optimizer's of ours. Raises ValueError: groups with different rates."""
    if not {f"{path}/{COUNT}", f"{path}/{SKIPPED}"} <= stored.objects.keys():
        return None
    steps = decoded(stored, f"{path}/{COUNT}")
    counts = steps if isinstance(steps, Mapping) else {"steps": steps}
    skipped = int(decoded(stored, f"{path}/{SKIPPED}"))
    saved = [
        {rate: group[rate] for rate in RATES if rate in group} for group in counts.get("groups", ())
    ]
    if any(rates != saved[0] for rates in saved):
        raise ValueError(
            f"{stored.directory.url}: {path!r} is an optimizer of core.optimizer with {len(saved)} param_groups of "
            "different rates, which do not say their parameters; go on with it, and not with one of torch.optim"
        )
    rates = saved[0] if saved else {}
    return OurCounts(int(counts["steps"]) - skipped, counts.get("behind", {}), rates)


def optimizers_in_words(
    group: str, missing: Iterable[str], unexpected: Iterable[str]
) -> str | None:
    """What to do where the optimizer in `group` of a state is of another kind than the checkpoint's; None: it is not.

    missing, unexpected: keys, as `Report` has them.
    """
    kinds = {
        f"{group}/{GROUPS}/": "one of torch.optim",
        f"{group}/{COUNT}": "one of core.optimizer",
    }
    here = [words for prefix, words in kinds.items() if _any(missing, prefix)]
    there = [words for prefix, words in kinds.items() if _any(unexpected, prefix)]
    if here == there or len(here) != 1 or len(there) != 1:
        return None
    return (
        f"{group!r} has the states of another kind of optimizer: {there[0]} was saved, {here[0]} is here. Go on with "
        f"the one that saved, or leave {group!r} out of the state and begin with new states; only AdamW's moments go "
        "over, where nothing else is saved and every parameter has some"
    )


def _any(keys: Iterable[str], prefix: str) -> bool:
    return any(key_of(key).startswith(prefix) for key in keys)
