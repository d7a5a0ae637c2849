"""Megatron's scheduler of rates and decays, counted in whatever `step(increment)` is given: samples or updates."""

import math
from collections.abc import Mapping
from typing import Any

from core.interop.megatron.absent import absent_names

_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
_WD_STYLES = ("constant", "linear", "cosine")
# what a checkpoint holds, and its names in older ones
_SAVED = {
    "max_lr": ("start_lr",),
    "min_lr": (),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
    "start_wd": (),
    "end_wd": (),
    "wd_incr_steps": (),
    "wd_incr_style": (),
}


def _half_cosine(share: float) -> float:
    """From 1 at 0 to 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * share))


class OptimizerParamScheduler:
    """Writes lr and weight_decay (times wd_mult) into `optimizer.param_groups`, now and in every `step`.

    A group's max_lr, min_lr, start_wd and end_wd take the place of those here. With n = num_steps, w of warm-up and d
    of decay: below w the rate is init_lr + (max_lr - init_lr) n/w; beyond d it is min_lr; between them
    min_lr + c (max_lr - min_lr), c of (n - w) / (d - w). wsd_decay_steps, lr_wsd_decay_style: of WSD, its last steps.
    The decay goes from start_wd to end_wd in wd_incr_steps.
    Raises ValueError: a value out of its range, an unknown style.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr = init_lr
        self.max_lr = float(max_lr)
        self.min_lr = min_lr
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.start_wd = start_wd
        self.end_wd = end_wd
        self.wd_incr_steps = wd_incr_steps
        self.wd_incr_style = wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
        self.num_steps = 0
        self._check_rates()
        self._check_decay()
        if override_opt_param_scheduler and use_checkpoint_opt_param_scheduler:
            raise ValueError(
                "OptimizerParamScheduler: override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are "
                "both True; leave 1 of 2"
            )
        self.step(0)

    def _check_rates(self) -> None:
        if not 0 <= self.min_lr <= self.max_lr or self.init_lr > self.max_lr:
            raise ValueError(
                f"OptimizerParamScheduler: init_lr={self.init_lr}, max_lr={self.max_lr}, min_lr={self.min_lr}; "
                "max_lr must be the largest, and min_lr at least 0"
            )
        warmup, decay = self.lr_warmup_steps, self.lr_decay_steps
        if decay <= 0 or warmup >= decay:
            raise ValueError(
                f"OptimizerParamScheduler: lr_warmup_steps={warmup} must be below lr_decay_steps={decay}, and that "
                "above 0"
            )
        _known("lr_decay_style", self.lr_decay_style, _STYLES)
        if self.lr_decay_style == "WSD":
            if not self.wsd_decay_steps:
                raise ValueError(
                    "OptimizerParamScheduler: lr_decay_style='WSD' with 0 wsd_decay_steps; give at least 1"
                )
            _known("lr_wsd_decay_style", self.lr_wsd_decay_style, _WSD_STYLES)

    def _check_decay(self) -> None:
        _known("wd_incr_style", self.wd_incr_style, _WD_STYLES)
        start, end = self.start_wd, self.end_wd
        if not 0 <= start <= end:
            raise ValueError(
                f"OptimizerParamScheduler: start_wd={start} must be at least 0 and at most end_wd={end}"
            )
        if self.wd_incr_style == "constant" and start != end:
            raise ValueError(
                f"OptimizerParamScheduler: wd_incr_style='constant' with start_wd={start} and end_wd={end}; give the "
                "same number, or wd_incr_style='linear'"
            )
        if self.wd_incr_style != "constant" and self.wd_incr_steps <= 0:
            raise ValueError(
                f"OptimizerParamScheduler: wd_incr_steps={self.wd_incr_steps} of "
                f"wd_incr_style={self.wd_incr_style!r} must be at least 1"
            )

    def get_lr(self, param_group: Mapping[str, Any] | None = None) -> float:
        """The rate of a group at num_steps."""
        own = param_group or {}
        largest, least = own.get("max_lr"), own.get("min_lr")
        largest = self.max_lr if largest is None else largest
        least = self.min_lr if least is None else least
        n, warmup, decay = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and n <= warmup:
            return self.init_lr + (largest - self.init_lr) * n / warmup
        if self.lr_decay_style == "constant":
            return largest
        if n > decay:
            return least
        if self.lr_decay_style == "inverse-square-root":
            return max(least, largest * math.sqrt(max(warmup, 1) / max(n, 1)))
        return least + self._share((n - warmup) / (decay - warmup)) * (largest - least)

    def _share(self, passed: float) -> float:
        """Of max_lr - min_lr, after a share of the steps between warm-up and the end."""
        if self.lr_decay_style == "linear":
            return 1.0 - passed
        if self.lr_decay_style == "cosine":
            return _half_cosine(passed)
        assert self.wsd_decay_steps is not None
        into = self.num_steps - (self.lr_decay_steps - self.wsd_decay_steps)
        if into <= 0:
            return 1.0
        share = into / self.wsd_decay_steps
        if self.lr_wsd_decay_style == "linear":
            return 1.0 - share
        if self.lr_wsd_decay_style == "cosine":
            return _half_cosine(share)
        if self.lr_wsd_decay_style == "exponential":
            return 2.0 * 0.5**share - 1.0
        return 1.0 - math.sqrt(share)

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """The decay of a group at num_steps, before its wd_mult."""
        own = param_group or {}
        start, end = own.get("start_wd", self.start_wd), own.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return end
        share = self.num_steps / self.wd_incr_steps
        if self.wd_incr_style == "cosine":
            share = _half_cosine(1.0 - share)
        return start + share * (end - start)

    def step(self, increment: int) -> None:
        """Count, and write every group's rate and decay: those of the next update."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The settings and num_steps."""
        return {name: getattr(self, name) for name in _SAVED} | {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: with its settings, or with those here (override_opt_param_scheduler).

        Raises ValueError: settings that differ, where neither of the two is said.
        """
        taken: dict[str, Any] = {}
        for name, older in _SAVED.items():
            found = next((key for key in (*older, name) if key in state_dict), None)
            if found is None or self.override_opt_param_scheduler:
                continue
            here, saved = getattr(self, name), state_dict[found]
            if here != saved and not self.use_checkpoint_opt_param_scheduler:
                raise ValueError(
                    f"OptimizerParamScheduler: {name}={here} here and {saved} in the checkpoint; say "
                    "use_checkpoint_opt_param_scheduler=True or override_opt_param_scheduler=True"
                )
            taken[name] = saved
        for name, value in taken.items():
            setattr(self, name, value)
        steps = state_dict["num_iters"] if "num_iters" in state_dict else state_dict["num_steps"]
        self.step(steps)


def _known(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"OptimizerParamScheduler: {name}={value!r} is none of the {len(known)}: {', '.join(known)}"
        )


__getattr__ = absent_names(__name__)
