"""`param_groups` as torch has them: rates, decay and betas by group, changed by hand or by torch's schedulers."""

import warnings
import zlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from core.data_parallel import DataParallel
from core.optimizer.config import OptimizerConfig
from core.optimizer.state.flat_shard import default_decays
from core.parallel_state.by_hand.functions import program_level
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import without_wrappers

# options of torch's optimizers that change the update, and that not all of ours have
_TORCH_OPTIONS = ("nesterov", "amsgrad", "maximize", "dampening", "differentiable")
# options of other optimizers, or other names of ours: a program that states one expects it to do something
_OTHER_NAMES = """
    momentum momentum_decay alpha rho eta lr_decay learning_rate wd decay epsilon beta beta1 beta2
"""
_ELSEWHERE = (*_TORCH_OPTIONS, *_OTHER_NAMES.split())
# what a given group says of its members
_MEMBERS = ("names", "params", "may_be_empty", "rest")
GroupOptions = Sequence[Mapping[str, Any]]


class Groups:
    """The given groups in their order, as in torch; then, if they leave parameters over on any rank, one of the rest.

    group_options: dicts as torch's, with "names" (patterns of parameter names) or "params", and options of their own.
    A group that states weight_decay decays all of its parameters, as in torch. "may_be_empty": one whose parameters
    all lie on other ranks. "rest": True in the place of names: the group of what no other takes, wherever it stands.
    all: `param_groups`. number_of: parameter name -> number of its group. decay_everything: numbers of the groups
    that decay all of theirs. rest: number of the group of the rest, or None. spares: biases and norms do not decay,
    by default.
    Collective when it is made. Raises ValueError: a pattern or parameter that is none of the shard's, an option of
    another optimizer.
    """

    def __init__(
        self,
        shard: DataParallel,
        config: OptimizerConfig,
        defaults: Mapping[str, Any],
        group_options: GroupOptions,
        *,
        spares: bool,
    ) -> None:
        self._schedule = config.learning_rate
        self._kind = config.lr_schedule
        self.leaves_out_skipped = self._schedule.leaves_out_skipped
        self._known_options = defaults.keys()
        named = shard.named_parameters()
        given = list(group_options)
        self.all: list[dict[str, Any]] = [
            _options_of(number, stated, defaults) for number, stated in enumerate(given)
        ]
        self.rest = next((number for number, of in enumerate(given) if of.get("rest")), None)
        self.number_of = _numbers_of_names(given, named, self.rest)
        # as many groups on every rank: stages of a pipeline hold other parameters
        has_rest = not given or len(self.number_of) < len(named)
        if any(all_gather_objects(has_rest, shard.ps.world)) and self.rest is None:
            self.rest = len(self.all)
            self.all.append(dict(defaults))
        if self.rest is not None:
            self.number_of = {name: self.number_of.get(name, self.rest) for name in named}
        for number, group in enumerate(self.all):
            group["params"] = [
                parameter for name, parameter in named.items() if self.number_of[name] == number
            ]
        self._sizes = [len(group["params"]) for group in self.all]

        # Decay: which groups decay everything, and which have biases and norms that are spared.
        self._decays = [group["weight_decay"] for group in self.all]
        self.decay_everything = {
            number for number, stated in enumerate(given) if "weight_decay" in stated
        }
        self._with_spared: set[int] = set()
        if spares:
            for name, number in self.number_of.items():
                if number not in self.decay_everything and not default_decays(
                    name, layout_of(named[name])
                ):
                    self._with_spared.add(number)

        # Rates: each group keeps its share of the schedule's.
        self._shares = [group["lr"] / config.lr if config.lr else 1.0 for group in self.all]
        warms_up = bool(config.lr_warmup_steps or config.lr_warmup_fraction)
        self._follows_schedule = config.lr_schedule != "constant" or warms_up
        self.follow(0)
        self._first_state = self.state()

    def follow(self, step: int) -> None:
        """Set the rates of the update before which `step` were made, unless somebody else sets them."""
        if self._follows_schedule:
            rate = self._schedule.at(step)
            for group, share in zip(self.all, self._shares, strict=True):
                group["lr"] = rate * share
        self._rates_set = [group["lr"] for group in self.all]

    def check(self) -> None:
        """Before an update: rates that somebody has changed are theirs from now on, with a warning if there is a
        schedule.

        Raises ValueError: an option set by hand that this optimizer does not have, parameters put in or taken out.
        """
        for number, group in enumerate(self.all):
            strange = [
                name
                for name in _TORCH_OPTIONS
                if name not in self._known_options and group.get(name)
            ]
            if strange:
                raise ValueError(
                    f"param_groups[{number}]['{strange[0]}'] = {group[strange[0]]} does nothing here; known are "
                    f"{', '.join(self._known_options)}; wrap the module in DistributedDataParallel and give torch's "
                    "optimizer"
                )
            if len(group["params"]) != self._sizes[number]:
                raise ValueError(
                    f"param_groups[{number}]['params'] had {self._sizes[number]} parameters and has "
                    f"{len(group['params'])}: states lie in buckets that were laid out for them; give groups= when "
                    "the optimizer is made, set lr to 0, or freeze them with requires_grad_(False)"
                )
        self._warn_of_partial_decay()
        # compared with what was set last: a scheduler of torch's writes into the same dicts
        if self._follows_schedule and [group["lr"] for group in self.all] != self._rates_set:
            self._follows_schedule = False
            warnings.warn(
                f"param_groups['lr'] was changed, so OptimizerConfig.lr_schedule={self._kind!r} sets it no longer; "
                "with schedulers of your own leave lr_schedule at 'constant' and lr_warmup_steps at 0",
                stacklevel=program_level(),
            )

    def _warn_of_partial_decay(self) -> None:
        """Warns, once, where a decay that was set by hand does not reach biases and norms."""
        for number in sorted(self._with_spared):
            group = self.all[number]
            if group["weight_decay"] != self._decays[number]:
                self._with_spared = set()
                warnings.warn(
                    f"param_groups[{number}]['weight_decay'] was changed to {group['weight_decay']}; its biases and "
                    "norms keep 0, as OptimizerConfig.weight_decay_of='matrices' says. weight_decay_of='all' decays "
                    "everything, as torch does, and so does a group that is given with a weight_decay of its own",
                    stacklevel=program_level(),
                )
                return

    def fingerprint(self) -> float:
        """Stands for all options of all groups: ranks that share parameters must have the same one.

        0 where an option is a tensor: reading it would wait for a device.
        """
        for group in self.all:
            if any(isinstance(value, Tensor) for key, value in group.items() if key != "params"):
                return 0.0
        # 32 bits: float64, in which it travels with the norm, holds them exactly
        return float(zlib.crc32(repr(self.state()).encode()))

    @property
    def rates_from_outside(self) -> bool:
        """Whether a scheduler or a program sets the rates, and no longer the configuration's schedule."""
        return not self._follows_schedule

    def changed(self) -> list[dict[str, Any]]:
        """`state`, if anybody has changed it since this was made; else nothing: a configuration may state it anew."""
        state = self.state()
        expected = self._first_state
        # the schedule's own rates are no change
        if not self.rates_from_outside:
            pairs = zip(self._first_state, state, strict=True)
            expected = [{**first, "lr": current["lr"]} for first, current in pairs]
        if state != expected:
            return state
        return []

    def state(self) -> list[dict[str, Any]]:
        """The options of each group, for a checkpoint; numbers only, in the order of `saved_order`."""
        return saved_order([_numbers(group) for group in self.all], self.rest)

    def load(self, state: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """What `state` gave. Raises ValueError: another number of groups."""
        given = [number for number in range(len(self.all)) if number != self.rest]
        if len(state) != 1 + len(given):
            raise ValueError(
                f"{len(state) - 1} param_groups beside that of the rest were saved, this optimizer has {len(given)}; "
                "make it with the same groups="
            )
        for number, saved in zip((self.rest, *given), state, strict=True):
            if number is not None:
                for key, value in saved.items():
                    if key not in ("params", "name"):
                        self.all[number][key] = tuple(value) if isinstance(value, list) else value
        # rates that are not the schedule's at this step were set from outside when they were saved
        if self._follows_schedule:
            rate = self._schedule.at(step)
            expected = [rate * share for share in self._shares]
            self._follows_schedule = [group["lr"] for group in self.all] == expected
        self._rates_set = [group["lr"] for group in self.all]
        self._decays = [group["weight_decay"] for group in self.all]

    def take_rates(self, rates: Mapping[str, Mapping[str, float]]) -> None:
        """Rates that a scheduler of torch's had set for parameters of torch's optimizer; our own schedule wins.

        Under "" are those of every parameter.
        Raises ValueError: several of one group.
        """
        if self._follows_schedule:
            return
        if "" in rates:
            rates = dict.fromkeys(self.number_of, rates[""])
        rates = {without_wrappers(name): rate for name, rate in rates.items()}
        for number, group in enumerate(self.all):
            names = [name for name, of in self.number_of.items() if of == number and name in rates]
            if any(rates[name] != rates[names[0]] for name in names):
                raise ValueError(
                    f"parameters of param_groups[{number}], such as {names[0]}, were saved with different rates by "
                    "an optimizer of torch's; give groups= when this one is made, as they were"
                )
            if names:
                group.update(rates[names[0]])
        self._rates_set = [group["lr"] for group in self.all]


def adamw_options(config: OptimizerConfig) -> dict[str, Any]:
    """A param group's of torch.optim.AdamW."""
    betas = (config.adam_beta1, config.adam_beta2)
    return {
        "lr": config.lr,
        "betas": betas,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }


def saved_order(groups: Sequence[Mapping[str, Any]], rest: int | None) -> list[Any]:
    """The order that checkpoints have: the group of the rest, or what stands for it, then the given ones."""
    first = groups[0 if rest is None else rest]
    return [first, *[group for number, group in enumerate(groups) if number != rest]]


def _options_of(
    number: int, stated: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """All options of a given group; those of the program's own (`lr_scale`) stay in it, as in torch.

    Raises ValueError: one of another optimizer's, or one that is nearly spelt like ours.
    """
    options = {key: value for key, value in stated.items() if key not in _MEMBERS}
    known = ["names", "params", "name", *defaults]
    meant = [
        key
        for key in options.keys() - known
        if (key in _ELSEWHERE and options[key]) or get_close_matches(key, known, cutoff=0.8)
    ]
    if meant:
        raise ValueError(
            f"param group {number} has {', '.join(sorted(meant))}; known are {', '.join(known)}"
        )
    return {**defaults, **options}


def _numbers_of_names(
    given: GroupOptions, named: Mapping[str, Any], rest: int | None
) -> dict[str, int]:
    """Parameter name -> number of the given group that takes it: of several patterns the last one that matches.

    Raises ValueError: a parameter in the "params" of two groups, as torch.
    """
    number_of: dict[str, int] = {}
    for number, stated in enumerate(given):
        if number == rest:
            continue
        for name in _member_names(stated, named, number):
            earlier = number_of.get(name)
            if earlier is not None and "params" in stated and "params" in given[earlier]:
                raise ValueError(
                    f"param groups {earlier} and {number} both have {name}; leave it out of one of them"
                )
            number_of[name] = number
    return number_of


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "name")}


def _plain(value: Any) -> Any:
    """A number for a tensor, a list for a tuple: what JSON keeps."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    return value


def _member_names(stated: Mapping[str, Any], named: Mapping[str, Any], number: int) -> list[str]:
    """Names of the parameters that group `number` states by patterns or as objects."""
    members: list[str] = []
    patterns = stated.get("names", ())
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [name for name in named if fnmatch(name, pattern)]
        if not matching:
            raise ValueError(
                f"param group {number}: {pattern!r} is the name of none of {len(named)} parameters"
            )
        members += matching
    name_of = {id(parameter): name for name, parameter in named.items()}
    parameters = stated.get("params", ())
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if id(parameter) in name_of:
            members.append(name_of[id(parameter)])
        elif parameter.requires_grad:
            raise ValueError(
                f"param group {number}: a parameter of shape {tuple(parameter.shape)} is none of the {len(named)} "
                "that the DataParallel holds; give it the module that has it"
            )
    if not members and not stated.get("may_be_empty"):
        raise ValueError(
            f"param group {number} names 0 parameters; give names=patterns or params=parameters"
        )
    return members
