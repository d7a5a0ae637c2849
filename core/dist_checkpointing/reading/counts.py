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
from core.dist_checkpointing.state.names import KeyMapping
from core.dist_checkpointing.state.optimizers import GROUPS
from core.dist_checkpointing.state.other_names import as_saved_here
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


def counts_of_torch(
    keys: Iterable[str], stored: StoredCheckpoint, key_mapping: KeyMapping
) -> TorchCounts:
    """Counts for an optimizer of ours whose states in the checkpoint are those of torch's AdamW. Reads its steps.

    keys: of the values that are loaded. Raises ValueError: layers of one stack with different counts; with a mapping,
    which says nothing of counts, parameters with different ones, or with different rates.
    """
    found = TorchCounts({}, {})
    for key in keys:
        path, _, name = key.rpartition("/")
        there, _, saved_name = key_mapping.value_key(key).rpartition("/")
        if name != COUNT or saved_name != COUNT or not path or f"{there}/{COUNT}" in stored.objects:
            continue
        groups = _options_of_torch(f"{there}/", stored)
        steps = _steps_of_torch(f"{there}/", stored)
        if not groups.values or not steps.values:
            continue
        most = max(steps.values.values())
        behind = {name: most - count for name, count in steps.values.items() if count < most}
        rates = _rates(groups.values)
        if not key_mapping.same:
            rates = _of_all(groups.values, rates, behind, there, stored)
        found.values[key] = {"steps": most, "behind": behind, "rates": rates}
        found.values[f"{path}/{SKIPPED}"] = 0
        found.sources[key] = [*groups.keys, *steps.keys]
        found.sources[f"{path}/{SKIPPED}"] = []
    return found


class _ByName(NamedTuple):
    """Name of a parameter, or of a stack of them -> what is saved of it; keys: that it was read from."""

    values: dict[str, Any]
    keys: list[str]


def _options_of_torch(prefix: str, stored: StoredCheckpoint) -> _ByName:
    """Options of each parameter's group: as saved here, or, of DCP, a list of groups, or a value for each option."""
    found = _ByName({}, [])
    for key in stored.objects:
        if not key.startswith(f"{prefix}{GROUPS}"):
            continue
        name = key.removeprefix(f"{prefix}{GROUPS}")
        if name.startswith("/"):
            found.values[name[1:]] = decoded(stored, key)
        elif name.startswith("."):
            parameter, _, option = name[1:].rpartition(".")
            found.values.setdefault(parameter, {})[option] = decoded(stored, key)
        elif not name and isinstance(groups := decoded(stored, key), list):
            for group in groups:
                found.values.update(dict.fromkeys(group.get("params", ()), group))
        else:
            continue
        found.keys.append(key)
    return found


def _rates(options_of: Mapping[str, Any]) -> dict[str, Any]:
    """Name of a parameter -> its rates, where a scheduler of torch's had set them; others a program states anew."""
    return {
        name: {rate: options[rate] for rate in RATES}
        for name, options in options_of.items()
        if "initial_lr" in options
    }


def _of_all(
    options_of: Mapping[str, Any],
    rates: Mapping[str, Any],
    behind: Mapping[str, int],
    path: str,
    stored: StoredCheckpoint,
) -> dict[str, Any]:
    """Rates under the name "", which stands for all: a mapping renames parameters, so they must be the same for each.

    Raises ValueError: they are not, or some parameters have made fewer updates.
    """
    all_rates = list(rates.values())
    of_some = len(rates) not in (0, len(options_of))
    if behind or of_some or any(other != all_rates[0] for other in all_rates):
        what = "counts of updates" if behind else "learning rates"
        raise ValueError(
            f"{stored.directory.url}: parameters of {path!r}, which torch's AdamW saved, have different {what}, and "
            "a mapping says what arrays are read from alone. Load without one, into the module that was saved and "
            "ShardedAdamW; save that; then load with the mapping"
        )
    return {"": all_rates[0]} if all_rates else {}


def _steps_of_torch(prefix: str, stored: StoredCheckpoint) -> _ByName:
    """Counts of updates. Reads the arrays."""
    steps = f"{prefix}step/"
    found = _ByName({}, [])
    for key in stored.objects:
        if (name := as_saved_here(key)).startswith(steps):
            found.values[name.removeprefix(steps)] = int(decoded(stored, key))
            found.keys.append(key)
    arrays = {}
    for key in stored.metadata:
        if as_saved_here(key_of(key)).startswith(steps):
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
        found.values[as_saved_here(key_of(key)).removeprefix(steps)] = different[0]
        found.keys.append(key)
    return found


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
