"""What an `OptimizerConfig` says of parameters by patterns of their names: who is frozen, rates, decays."""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from core.optimizer.config import OptimizerConfig


def patterns_of(config: OptimizerConfig) -> list[tuple[str, str]]:
    """(field, pattern) of every pattern."""
    fields = ("freeze", "lr_multipliers", "weight_decays")
    return [(field, pattern) for field in fields for pattern in getattr(config, field)]


def unmatched(
    config: OptimizerConfig,
    names: Iterable[str],
    told_of: Callable[[str, list[str]], str] = lambda pattern, names: "",
) -> list[str]:
    """A message for each pattern that is no parameter's name in the whole model; `told_of` adds what it knows."""
    parameter_names = list(names)
    messages = []
    for field, pattern in patterns_of(config):
        if not any(fnmatchcase(name, pattern) for name in parameter_names):
            example = told_of(pattern, parameter_names)
            if parameter_names and not example:
                example = f", the first is {parameter_names[0]}"
            messages.append(
                f"{field}={pattern!r} is the name of none of the model's {len(parameter_names)} parameters{example}"
            )
    return messages


def is_frozen(config: OptimizerConfig, name: str) -> bool:
    """Whether a parameter of this name is not trained."""
    return any(fnmatchcase(name, pattern) for pattern in config.freeze)


def groups_by_name(config: OptimizerConfig, names: Iterable[str]) -> list[dict[str, Any]]:
    """Param groups for `Groups`: as many on every rank, whichever of the names it holds; first that of the rest."""
    if not config.lr_multipliers and not config.weight_decays:
        return []
    members: dict[tuple[str | None, str | None], list[str]] = {}
    for name in names:
        key = _last_match(config.lr_multipliers, name), _last_match(config.weight_decays, name)
        members.setdefault(key, []).append(name)
    # number 0 has the configuration's own rate
    groups: list[dict[str, Any]] = [{"rest": True}]
    for rate, decay in product((None, *config.lr_multipliers), (None, *config.weight_decays)):
        if rate is None and decay is None:
            continue
        group: dict[str, Any] = {"names": members.get((rate, decay), []), "may_be_empty": True}
        if rate is not None:
            group["lr"] = config.lr * float(config.lr_multipliers[rate])
        if decay is not None:
            group["weight_decay"] = float(config.weight_decays[decay])
        groups.append(group)
    return groups


def _last_match(table: Mapping[str, Any], name: str) -> str | None:
    matching = [pattern for pattern in table if fnmatchcase(name, pattern)]
    if matching:
        return matching[-1]
    return None
