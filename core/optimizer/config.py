"""The optimizer's configuration, under Megatron's names."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches

from core.field_names import ALIKE, tells_names
from core.optimizer.schedules.deepspeed import SCHEDULES, DeepSpeedSchedule, schedule
from core.optimizer.schedules.schedule import LR_SCHEDULES, LearningRate
from core.parallel_state.config import raise_all

OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "muon", "lion", "lamb", "adafactor")
# they look at parameters as a whole, on the device
NEEDS_STATES_AT_HAND = ("muon", "lamb", "adafactor")
# of transformers' TrainingArguments.optim, torchao and bitsandbytes, in small letters
_NAMES_ELSEWHERE = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit, with data_parallel.offload=optimizer",
    "paged_adamw": "adamw, with data_parallel.offload=optimizer",
    "paged_adamw_32bit": "adamw, with data_parallel.offload=optimizer",
    "lion_32bit": "lion",
}
# Megatron's words, of optimizers and schedules
_VALUES_ELSEWHERE = {
    "adam": "adamw, whose decay is decoupled as that of Megatron's adam",
    "inverse_square_root": "inverse_sqrt",
}
MUON_LR_SCALES = ("match_rms_adamw", "original")
DECAY_CHOICES = ("matrices", "all")
# step counts are multiplied by fractions, in floats: larger ones lose precision
MOST_STEPS = 1 << 62


_ONE_UPDATE = "leave it out: one update of a bucket is used, fused where torch has one"
# of torch.optim's arguments -> what there is
_THEIRS = {
    "betas": "give adam_beta1 and adam_beta2",
    "max_norm": "give clip_grad",
    "fused": _ONE_UPDATE,
    "foreach": _ONE_UPDATE,
    "capturable": _ONE_UPDATE,
    "amsgrad": "not here: torch.optim.AdamW(model.parameters(), amsgrad=True) works beside a DataParallel",
    "maximize": "not here: negate the loss",
    "nesterov": "not here: torch.optim.SGD(model.parameters(), nesterov=True) works beside a DataParallel",
}


@tells_names("optimizer", _THEIRS)
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update, its learning rate and its clipping.

    Raises ValueError: every value out of its range, all at once.
    """

    lr: float = 1e-3
    """Largest learning rate."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    lr_schedule: str = "constant"
    """constant, inverse_sqrt, linear, cosine, wsd; or of DeepSpeed WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle,
    LRRangeTest, which read lr_schedule_options, and of the fields here lr only, where they need one."""

    lr_warmup_steps: int = 0
    """Updates of the warm-up, from 0 up to lr."""

    lr_warmup_fraction: float = 0.0
    """Share of lr_decay_steps that is warm-up, where lr_warmup_steps is 0; DeepSpeed's schedules do not read it."""

    lr_decay_steps: int | None = None
    """Update at which linear, cosine and wsd reach min_lr; they need it. A run's default: training.train_steps."""

    lr_wsd_decay_steps: int | None = None
    """Updates of wsd's decay, the last ones before lr_decay_steps; wsd needs it."""

    lr_schedule_options: dict[str, str | float] = field(default_factory=dict)
    """Parameters of a schedule of DeepSpeed's, by their names there."""

    weight_decay: float = 0.01
    """Decoupled decay per unit of learning rate, of what weight_decay_of says; of sgd torch's, into the gradient."""

    weight_decay_of: str = "matrices"
    """What decays: matrices, parameters of at least 2 dims that are no biases; or all, as in torch and DeepSpeed."""

    adam_beta1: float = 0.9
    """Decay of AdamW's first moment per update."""

    adam_beta2: float = 0.999
    """Decay of AdamW's second moment per update."""

    adam_eps: float = 1e-8
    """Added to the root of AdamW's second moment."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    optimizer: str = "adamw"
    """adamw, adamw8bit, sgd (with momentum 0.9 and weight_decay, unless they are 0), muon, lion, lamb, adafactor."""

    momentum: float | None = None
    """Of sgd and muon; None: 0.9 of sgd, 0.95 of muon, its publication's."""

    muon_lr: str = "match_rms_adamw"
    """Of muon, lr times: match_rms_adamw, 0.2 sqrt(max(rows, columns)), one lr for AdamW's parameters too; original,
    sqrt(max(1, rows / columns)), the publication's and DeepSpeed's."""

    muon_except: str = ""
    """Of muon, words with commas between: AdamW updates the matrices with one of them in their name (DeepSpeed's are
    "embed,lm_head"); default: embeddings and the output layer, found by their place in the model."""

    lion_beta1: float = 0.9
    """Of lion, share of the momentum in the direction of an update."""

    lion_beta2: float = 0.99
    """Of lion, decay of the momentum per update."""

    adafactor_beta2_decay: float = -0.8
    """Of adafactor, 1 - beta2 is the number of updates to this power."""

    adafactor_eps1: float | None = None
    """Of adafactor, least root of a second moment that a gradient is divided by; None: the eps of the dtype."""

    adafactor_eps2: float = 1e-3
    """Of adafactor, least root mean square of a parameter that its rate is multiplied by."""

    adafactor_d: float = 1.0
    """Of adafactor, largest root mean square of a parameter's update before the rate."""

    freeze: tuple[str, ...] = ()
    """Patterns of names, as "embedding.*" or "decoder.layers.[0-3].*": these parameters are not trained."""

    lr_multipliers: dict[str, str | float] = field(default_factory=dict)
    """Pattern of names -> what the learning rate is multiplied by for these parameters; the last match counts."""

    weight_decays: dict[str, str | float] = field(default_factory=dict)
    """Pattern of names -> the weight decay of these parameters, biases among them; the last match counts."""

    ema_decay: float = 0.0
    """Decay per update of an exponential moving average of the weights, as 0.999; 0: none is kept."""

    main_params: bool = True
    """Keep a float32 copy of 16-bit weights; without, bfloat16 weights are updated with stochastic rounding."""

    rounding_seed: int = 0
    """Seed of the stochastic rounding, a hash of it, step, name and element."""

    initial_loss_scale: float = 2.0**16
    """What the loss of float16 weights is multiplied by at first; halved after an overflow."""

    loss_scale_window: int = 1000
    """Good updates in a row after which the loss scale is doubled."""

    max_skipped_steps: int = 0
    """That many skipped updates in a row are an error; 0: only if all of the first 100 are."""

    skip_grad_norm_above: float = 0.0
    """Skip an update whose gradient norm is above this times the median of those before; 0: none is skipped."""

    skip_window: int = 128
    """Of how many norms skip_grad_norm_above takes the median; nothing is skipped before half of them are known."""

    def __post_init__(self) -> None:
        if isinstance(self.freeze, str):  # a pattern by itself
            object.__setattr__(self, "freeze", (self.freeze,))
        raise_all("OptimizerConfig", self._rules())

    def _schedule_rules(self) -> Iterator[tuple[bool, str]]:
        known = (*LR_SCHEDULES, *SCHEDULES)
        yield (
            self.lr_schedule in known,
            f"lr_schedule={self.lr_schedule!r} is unknown; {_meant(self.lr_schedule, known)}known: "
            f"{', '.join(known)}",
        )
        if self.lr_schedule in LR_SCHEDULES:
            yield (
                not self.lr_schedule_options,
                f"lr_schedule={self.lr_schedule} has its own fields and takes 0 lr_schedule_options, "
                f"{len(self.lr_schedule_options)} given ({', '.join(self.lr_schedule_options)}); leave them out",
            )
        share = self.lr_warmup_fraction
        decay = self.lr_decay_steps
        yield 0 <= share < 1, f"lr_warmup_fraction={share} must be at least 0 and below 1"
        yield (
            not share
            or decay is not None
            or bool(self.lr_warmup_steps)
            or self.lr_schedule not in LR_SCHEDULES,
            f"lr_warmup_fraction={share} is a share of lr_decay_steps, which is None; give it, or lr_warmup_steps",
        )
        step_fields = ("lr_warmup_steps", "lr_decay_steps", "lr_wsd_decay_steps")
        too_large = [name for name in step_fields if (getattr(self, name) or 0) > MOST_STEPS]
        for name in too_large:
            yield False, f"{name}={getattr(self, name)} must be at most 2**62"
        are_in_order = 0 <= self.min_lr <= self.lr or self.lr_schedule in SCHEDULES
        yield are_in_order, f"min_lr={self.min_lr} must be between 0 and lr={self.lr}"
        if self.lr_schedule in known and not too_large and are_in_order:
            # a schedule checks its own fields when it is made
            try:
                _ = self.learning_rate
            except ValueError as error:
                yield False, str(error)

    def _adafactor_rules(self) -> Iterator[tuple[bool, str]]:
        power = self.adafactor_beta2_decay
        yield power <= 0, f"adafactor_beta2_decay={power} must be at most 0 (-0.8)"
        if (eps1 := self.adafactor_eps1) is not None:
            yield eps1 >= 0, f"adafactor_eps1={eps1} must be at least 0, or None, the dtype's"
        least = self.adafactor_eps2
        yield least >= 0, f"adafactor_eps2={least} must be at least 0"
        yield self.adafactor_d >= 1, f"adafactor_d={self.adafactor_d} must be at least 1"

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from self._schedule_rules()
        yield self.weight_decay >= 0, f"weight_decay={self.weight_decay} must be at least 0"
        decay_of = self.weight_decay_of
        yield (
            decay_of in DECAY_CHOICES,
            f"weight_decay_of={decay_of!r} is unknown; known: {', '.join(DECAY_CHOICES)}",
        )
        for name in ("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2"):
            yield (
                0 <= getattr(self, name) < 1,
                f"{name}={getattr(self, name)} must be at least 0 and below 1",
            )
        yield self.adam_eps >= 0, f"adam_eps={self.adam_eps} must be at least 0"
        yield from self._adafactor_rules()
        yield (
            self.clip_grad >= 0,
            f"clip_grad={self.clip_grad} must be at least 0 (0 does not clip)",
        )
        yield (
            self.optimizer in OPTIMIZERS,
            f"optimizer={self.optimizer!r} is unknown{_ours(self.optimizer)}known: "
            f"{', '.join(OPTIMIZERS)}",
        )
        yield (
            self.muon_lr in MUON_LR_SCALES,
            f"muon_lr={self.muon_lr!r} is unknown; known: {', '.join(MUON_LR_SCALES)}",
        )
        for name in ("lr_multipliers", "weight_decays"):
            for pattern, value in getattr(self, name).items():
                is_valid = isinstance(value, int | float) and value >= 0
                yield (
                    is_valid,
                    f"{name} has {pattern!r}: {value!r}; a number of at least 0 is needed",
                )
        ema = self.ema_decay
        yield 0 <= ema < 1, f"ema_decay={ema} must be at least 0 (no average) and below 1"
        momentum = self.first_momentum
        yield 0 <= momentum < 1, f"momentum={momentum} must be at least 0 and below 1"
        yield (
            self.initial_loss_scale >= 1,
            f"initial_loss_scale={self.initial_loss_scale} must be at least 1",
        )
        yield (
            self.loss_scale_window >= 1,
            f"loss_scale_window={self.loss_scale_window} must be at least 1",
        )
        yield (
            self.max_skipped_steps >= 0,
            f"max_skipped_steps={self.max_skipped_steps} must be at least 0 (never)",
        )
        yield (
            self.skip_grad_norm_above == 0 or self.skip_grad_norm_above > 1,
            f"skip_grad_norm_above={self.skip_grad_norm_above} must be above 1 (times the median), or 0 (skips none)",
        )
        yield self.skip_window >= 2, f"skip_window={self.skip_window} must be at least 2 norms"

    @property
    def first_momentum(self) -> float:
        """`momentum`, or what the optimizer begins with where that is None."""
        if self.momentum is not None:
            return self.momentum
        if self.optimizer == "muon":
            return 0.95
        return 0.9

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The kinds of states, beside main weights, of which each trained parameter of a model has some or all."""
        kinds = {
            "adamw": ("exp_avg", "exp_avg_sq"),
            "adamw8bit": ("exp_avg", "exp_avg_sq"),
            "sgd": ("momentum_buffer",) if self.first_momentum else (),
            "lion": ("exp_avg",),
            "lamb": ("exp_avg", "exp_avg_sq"),
            # matrices the first two, others the third
            "adafactor": ("row_var", "col_var", "variance"),
        }
        # hidden matrices the first, others the rest
        muon = ("momentum_buffer", "exp_avg", "exp_avg_sq")
        return kinds.get(self.optimizer, muon) + (("ema",) if self.ema_decay else ())

    @property
    def learning_rate(self) -> LearningRate | DeepSpeedSchedule:
        """The schedule that these fields describe: `.at(step)` is the rate after that many updates."""
        if self.lr_schedule in SCHEDULES:
            return schedule(self.lr_schedule, self.lr_schedule_options, self.lr)
        share_of_decay = int(self.lr_warmup_fraction * (self.lr_decay_steps or 0))
        return LearningRate(
            peak=self.lr,
            minimum=self.min_lr,
            warmup_steps=self.lr_warmup_steps or share_of_decay,
            total_steps=self.lr_decay_steps,
            kind=self.lr_schedule,
            decay_steps=self.lr_wsd_decay_steps,
        )


def _ours(name: str) -> str:
    """What an optimizer is called here that has another name elsewhere."""
    lowered = name.lower()
    ours = _NAMES_ELSEWHERE.get(lowered, lowered if lowered in OPTIMIZERS else "")
    if ours:
        return f", here it is {ours}; "
    return f"; {_meant(name, OPTIMIZERS)}"


def _meant(value: str, known: tuple[str, ...]) -> str:
    """The known value that is spelt nearly so, or is called so elsewhere; empty: nobody knows."""
    spelt = {name.lower(): name for name in known}
    name = str(value).lower().replace("-", "_")
    near = [name] if name in spelt else get_close_matches(name, spelt, n=1, cutoff=ALIKE)
    meant = _VALUES_ELSEWHERE.get(name) or (spelt[near[0]] if near else "")
    return f"did you mean {meant}? " if meant else ""
