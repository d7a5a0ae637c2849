"""`param_groups` as torch has them: rates, decay and betas by group, changed by hand or by torch's schedulers."""

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.state.flat_shard import default_decays
from core.parallel_state.layout import layout_of

_TORCHS = ("nesterov", "amsgrad", "maximize", "dampening", "differentiable")  # options of torch's, not of all of ours
Given = Sequence[Mapping[str, Any]]


class Groups:
    """Group 0 holds every parameter that none of the given groups takes.

    given: dicts as torch's, with "names" (patterns of parameter names) or "params", and options of their own. A group
    that states weight_decay decays all of its parameters, as in torch.
    all: `param_groups`. of: name -> its group. decays_all: groups that decay all of theirs.
    spares: biases and norms do not decay, by default. spared: the groups in which there are some.
    Raises ValueError: a pattern or parameter that is none of the shard's, an option that no group has.
    """

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        defaults: Mapping[str, Any],
        given: Given,
        *,
        spares: bool,
    ) -> None:
        self._schedule, self._kind = config.learning_rate, config.lr_schedule
        self.leaves_out_skipped = self._schedule.leaves_out_skipped
        named = shard.named_parameters()
        self.of = dict.fromkeys(named, 0)
        self.all: list[dict[str, Any]] = [dict(defaults)]
        for number, told in enumerate(given, 1):
            options = {key: value for key, value in told.items() if key not in ("names", "params")}
            if unknown := options.keys() - defaults.keys() - {"name"}:
                raise ValueError(
                    f"param group {number} has {', '.join(sorted(unknown))}; known are names, params, name, "
                    f"{', '.join(defaults)}"
                )
            self.all.append({**defaults, **options})
            for name in _members(told, named, number):
                self.of[name] = number
        for number, group in enumerate(self.all):
            group["params"] = [named[name] for name, its in self.of.items() if its == number]
        self._decays = [group["weight_decay"] for group in self.all]
        self._known, self._sizes = defaults.keys(), [len(group["params"]) for group in self.all]
        self.decays_all = {n for n, told in enumerate(given, 1) if "weight_decay" in told}
        flat = {its for name, its in self.of.items() if not default_decays(name, layout_of(named[name]))}
        self.spared = flat - self.decays_all if spares else set()
        self._shares = [group["lr"] / config.lr if config.lr else 1.0 for group in self.all]
        self._follows = config.lr_schedule != "constant" or bool(config.lr_warmup_steps or config.lr_warmup_fraction)
        self.follow(0)
        self._first = self.state()

    def follow(self, step: int) -> None:
        """Set the rates of the update before which `step` were made, unless somebody else sets them."""
        if self._follows:
            rate = self._schedule.at(step)
            for group, share in zip(self.all, self._shares, strict=True):
                group["lr"] = rate * share
        self._written = [group["lr"] for group in self.all]

    def check(self) -> None:
        """Before an update: rates that somebody has changed are theirs from now on; told, if there is a schedule.

        Raises ValueError: an option set by hand that this optimizer does not have, parameters put in or taken out.
        """
        for number, group in enumerate(self.all):
            if strange := [name for name in _TORCHS if name not in self._known and group.get(name)]:
                raise ValueError(
                    f"param_groups[{number}]['{strange[0]}'] = {group[strange[0]]} does nothing here; known are "
                    f"{', '.join(self._known)}; wrap the module in DistributedDataParallel and give torch's optimizer"
                )
            if len(group["params"]) != self._sizes[number]:
                raise ValueError(
                    f"param_groups[{number}]['params'] had {self._sizes[number]} parameters and has "
                    f"{len(group['params'])}: states lie in buckets that were laid out for them; give groups= when "
                    "the optimizer is made, set lr to 0, or freeze them with requires_grad_(False)"
                )
        self._tell_of_decay()
        if self._follows and [group["lr"] for group in self.all] != self._written:
            self._follows = False
            warnings.warn(
                f"param_groups['lr'] was changed, so OptimizerConfig.lr_schedule={self._kind!r} sets it no longer; "
                "with schedulers of your own leave lr_schedule at 'constant' and lr_warmup_steps at 0",
                stacklevel=4,
            )

    def _tell_of_decay(self) -> None:
        """Warns, once: a decay that was set by hand is not everything's."""
        for number in sorted(self.spared):
            group = self.all[number]
            if group["weight_decay"] != self._decays[number]:
                self.spared = set()  # told
                warnings.warn(
                    f"param_groups[{number}]['weight_decay'] was changed to {group['weight_decay']}; its biases and "
                    "norms keep 0, as OptimizerConfig.weight_decay_of='matrices' says. weight_decay_of='all' decays "
                    "everything, as torch does, and so does a group that is given with a weight_decay of its own",
                    stacklevel=5,
                )
                return

    def number(self) -> float:
        """Stands for all options of all groups: ranks that share parameters must have the same."""
        if any(isinstance(value, Tensor) for group in self.all for key, value in group.items() if key != "params"):
            return 0.0  # nobody waits for a device
        return float(zlib.crc32(repr(self.state()).encode()))

    @property
    def theirs(self) -> bool:
        """Whether rates are set from outside."""
        return not self._follows

    def changed(self) -> list[dict[str, Any]]:
        """`state`, if anybody has changed it since this was made; else nothing: a configuration may say it anew."""
        state = self.state()
        mine = self._first if self.theirs else [{**f, "lr": s["lr"]} for f, s in zip(self._first, state, strict=True)]
        return state if state != mine else []

    def state(self) -> list[dict[str, Any]]:
        """The options of each group, for a checkpoint; numbers only."""
        return [
            {key: _plain(value) for key, value in group.items() if key not in ("params", "name")}
            for group in self.all
        ]

    def load(self, state: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """What `state` gave. Raises ValueError: another number of groups."""
        if len(state) != len(self.all):
            raise ValueError(
                f"{len(state)} param_groups were saved, this optimizer has {len(self.all)}; make it with the same"
            )
        for group, told in zip(self.all, state, strict=True):
            told = {key: value for key, value in told.items() if key not in ("params", "name")}
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in told.items()})
        if self._follows:
            rate = self._schedule.at(step)
            self._follows = all(
                group["lr"] == rate * share for group, share in zip(self.all, self._shares, strict=True)
            )
        self._written = [group["lr"] for group in self.all]
        self._decays = [group["weight_decay"] for group in self.all]


def adamw_options(config: OptimizerConfig) -> dict[str, Any]:
    """A param group's of torch.optim.AdamW."""
    betas = (config.adam_beta1, config.adam_beta2)
    return {"lr": config.lr, "betas": betas, "eps": config.adam_eps, "weight_decay": config.weight_decay}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value


def _members(told: Mapping[str, Any], named: Mapping[str, Any], number: int) -> list[str]:
    found: list[str] = []
    patterns: Iterable[str] = told.get("names", ())
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [name for name in named if fnmatch(name, pattern)]
        if not matching:
            raise ValueError(f"param group {number}: {pattern!r} is the name of 0 of {len(named)} parameters")
        found += matching
    names = {id(p): name for name, p in named.items()}
    given = told.get("params", ())
    for p in [given] if isinstance(given, Tensor) else given:
        if id(p) in names:
            found.append(names[id(p)])
        elif p.requires_grad:
            raise ValueError(
                f"param group {number}: a parameter of shape {tuple(p.shape)} is none of the {len(named)} that the "
                "DataParallel holds; give it the module that has it"
            )
    if not found:
        raise ValueError(f"param group {number} names 0 parameters; give names=patterns or params=parameters")
    return found
