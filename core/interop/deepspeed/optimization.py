"""The sections optimizer and scheduler of a ds_config.json: the update, its numbers and its learning rate."""

from collections.abc import Sequence
from typing import Any

from core.interop.deepspeed.reader import ConfigReader
from core.optimizer import OptimizerConfig
from core.optimizer.schedules.deepspeed import MOMENTUM, SCHEDULES, schedule

PARAMS = "optimizer.params"
SCHEDULER_PARAMS = "scheduler.params."
# a run's own default is cosine with warmup, DeepSpeed's a rate that stays
CONSTANT: dict[str, Any] = {"lr_schedule": "constant", "lr_warmup_fraction": 0.0}


def optimizer(reader: ConfigReader) -> None:
    """The optimizer and its numbers; what the file does not set has DeepSpeed's default."""
    name = reader.value("optimizer.type", str)
    kinds = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "muon": "muon", "lion": "lion"}
    # of torch.optim, as every name that DeepSpeed does not know itself
    kinds["adafactor"] = "adafactor"
    if name is not None and name.lower() not in kinds:
        reader.report(
            "optimizer.type", "unsupported", f"known: {', '.join(kinds)}; the optimizer stays ours"
        )
        for key in [key for key in reader.unread if key.startswith(f"{PARAMS}.")]:
            reader.report(key, "unsupported", f"of optimizer.type={name}")
        return
    kind = kinds[name.lower()] if name is not None else None
    is_adam = name is not None and name.lower() == "adam"
    # weight decay through the moments
    plain_adam = is_adam and reader.value(f"{PARAMS}.adam_w_mode") is False
    if kind is not None:
        reader.map_to("optimizer.type", "optimizer", optimizer=kind)
        is_torch_adamw = kind == "adamw" and reader.value(f"{PARAMS}.torch_adam") and not plain_adam
        _weight_decay(reader, 0.01 if is_torch_adamw else 0.0, plain_adam)
    if kind == "muon":
        _muon(reader)
    reader.map_field(f"{PARAMS}.lr", "optimizer", "lr", float)
    if kind == "adafactor":
        _adafactor(reader)
    reader.map_field(f"{PARAMS}.eps", "optimizer", "adam_eps", float)
    betas = reader.value(f"{PARAMS}.betas")
    if betas is not None:  # a pair, two fields here
        if not (isinstance(betas, Sequence) and len(betas) == 2):
            raise ValueError(f"{PARAMS}.betas={betas!r} must be 2 numbers; give both")
        owner = "lion" if kind == "lion" else "adam"
        fields = {f"{owner}_beta1": betas[0], f"{owner}_beta2": betas[1]}
        reader.map_to(f"{PARAMS}.betas", "optimizer", **fields)
    # DeepSpeed's SGD has no momentum by default, ours has
    if kind == "sgd" or f"{PARAMS}.momentum" in reader.unread:
        reader.map_to(
            f"{PARAMS}.momentum",
            "optimizer",
            momentum=reader.value(f"{PARAMS}.momentum", float) or 0.0,
        )

    # options that we have in one form only
    for key, supported, reason in (
        ("bias_correction", True, "moments are always corrected"),
        ("amsgrad", False, "the largest second moment is not kept"),
        ("maximize", False, "the loss is made small"),
        ("nesterov", kind == "muon", "momentum is the plain one, of Muon Nesterov's"),
        ("dampening", 0, "momentum is not dampened"),
    ):
        value = reader.value(f"{PARAMS}.{key}")
        if value is not None:
            reader.report_support(f"{PARAMS}.{key}", value == supported, reason)


def _weight_decay(reader: ConfigReader, default: float, plain_adam: bool) -> None:
    """Weight decay of every parameter, as in DeepSpeed; `default`: where the file does not say how much."""
    key = f"{PARAMS}.weight_decay"
    if reader.is_unresolved_auto(key):
        reader.fields["optimizer"]["weight_decay_of"] = "all"
    else:
        decay = reader.value(key, float)
        if decay is None:
            decay = default
        fields: dict[str, Any] = {"weight_decay": decay}
        if decay:
            fields["weight_decay_of"] = "all"
        reader.map_to(key, "optimizer", **fields)
        if plain_adam and decay:
            reader.report(
                f"{PARAMS}.adam_w_mode",
                "unsupported",
                "decay is decoupled; use AdamW, or a decay of 0",
            )
    if f"{PARAMS}.adam_w_mode" in reader.unread:
        reason = "nothing decays" if plain_adam else "decay is AdamW's"
        reader.report(f"{PARAMS}.adam_w_mode", "mapped", reason)


def _adafactor(reader: ConfigReader) -> None:
    """torch.optim.Adafactor's own numbers, and its rate where the file gives none."""
    if f"{PARAMS}.lr" not in reader.unread:
        reader.fields["optimizer"]["lr"] = 1e-2
    for name in ("beta2_decay", "d"):
        reader.map_field(f"{PARAMS}.{name}", "optimizer", f"adafactor_{name}", float)
    key = f"{PARAMS}.eps"
    eps = reader.value(key)
    if eps is not None:
        if not (isinstance(eps, Sequence) and len(eps) == 2):
            raise ValueError(
                f"{key}={eps!r} must be 2 numbers, the first one null or a number; give both"
            )
        fields = {"adafactor_eps1": eps[0], "adafactor_eps2": eps[1]}
        reader.map_to(
            key, "optimizer", **{name: value for name, value in fields.items() if value is not None}
        )


def _muon(reader: ConfigReader) -> None:
    """Muon in Keller Jordan's form, as in DeepSpeed: its scaling of the rate, its and Adam's defaults."""
    reader.fields["optimizer"] |= {
        "muon_lr": "original",
        "muon_except": "embed,lm_head",
        "momentum": 0.95,
    }
    reader.fields["optimizer"] |= {"adam_beta2": 0.95, "adam_eps": 1e-10}
    common_lr = reader.value(f"{PARAMS}.lr", float)
    is_open = reader.is_unresolved_auto(f"{PARAMS}.lr")
    muon_lr, adam_lr = (reader.value(f"{PARAMS}.{key}", float) for key in ("muon_lr", "adam_lr"))
    if muon_lr is not None or not is_open:
        # each rate of its own, else the common one, else DeepSpeed's default
        muon_lr = _first_given(muon_lr, common_lr, 0.02)
        adam_lr = _first_given(adam_lr, common_lr, 3e-4)
        key = f"{PARAMS}.muon_lr"
        if key not in reader.unread:
            key = f"{PARAMS}.lr"
        reader.map_to(key, "optimizer", lr=muon_lr)
        if adam_lr != muon_lr:
            remedy = "ShardedMuon(groups=[{'names': ..., 'lr': ...}])"
            reason = f"1 rate for all, {muon_lr:g}; for {adam_lr:g} beside it {remedy}"
            reader.report(f"{PARAMS}.adam_lr", "unsupported", reason)
        for key in ("lr", "adam_lr"):
            if f"{PARAMS}.{key}" in reader.unread:
                reader.report(f"{PARAMS}.{key}", "mapped", f"optimizer.lr={muon_lr}")
    if f"{PARAMS}.ns_method" in reader.unread:
        reader.report(
            f"{PARAMS}.ns_method",
            "ignored",
            "five steps of Newton and Schulz, in torch.optim.Muon's form",
        )


def _first_given(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def scheduler(reader: ConfigReader) -> None:
    """One of DeepSpeed's five learning rate schedules, if all its numbers are known."""
    name = reader.value("scheduler.type", str)
    keys = [key for key in reader.unread if key.startswith(SCHEDULER_PARAMS)]
    if name is None and reader.fields.get("optimizer", {}).get("optimizer") is None:
        # optimizer and schedule are made by the script
        return
    reader.fields.setdefault("optimizer", {}).update(CONSTANT)
    if name is None:
        reader.report("scheduler.type", "mapped", "optimizer.lr_schedule=constant")
        return
    if name not in SCHEDULES:
        reader.report(
            "scheduler.type", "unsupported", f"known: {', '.join(SCHEDULES)}; the rate is constant"
        )
        for key in keys:
            reader.report(key, "unsupported", f"of scheduler.type={name}")
        return

    options = _schedule_options(reader, name, keys)
    if options is None:
        reader.report(
            "scheduler.type",
            "unsupported",
            "its number of steps is not known; the rate is constant",
        )
        return
    if name == "OneCycle" and "scheduler.params.cycle_momentum" not in keys:
        reader.report(
            "scheduler.params.cycle_momentum",
            "unsupported",
            "the momentum has 1 value for the whole run",
        )
    # raises for options that the schedule does not have
    schedule(name, options, reader.fields.get("optimizer", {}).get("lr", OptimizerConfig().lr))
    reader.fields.setdefault("optimizer", {})["lr_schedule_options"] = options
    reader.map_to("scheduler.type", "optimizer", lr_schedule=name)


def _schedule_options(
    reader: ConfigReader, name: str, keys: Sequence[str]
) -> dict[str, Any] | None:
    """The schedule's own numbers, passed on under DeepSpeed's names; None: its number of steps is not known."""
    options: dict[str, Any] = {}
    steps_are_missing = False
    for key in keys:
        option = key.removeprefix(SCHEDULER_PARAMS)
        value = reader.value(key)
        if option == "last_batch_iteration":
            reason = "the optimizer's step count is where the schedule is"
            reader.report(key, "ignored" if value in (None, -1) else "unsupported", reason)
        elif reader.is_unresolved_auto(key) and option.endswith("num_steps"):
            steps_are_missing = True
            reader.report(
                key, "unsupported", f"left to Hugging Face's Trainer: give auto={{{key!r}: ...}}"
            )
        elif reader.is_unresolved_auto(key) and (name, option) == (
            "WarmupDecayLR",
            "warmup_max_lr",
        ):
            # the optimizer's rate; DeepSpeed's default is 0.001
            options[option] = "auto"
            reader.report(
                key, "mapped", "optimizer.lr_schedule_options[warmup_max_lr]=auto, optimizer.lr"
            )
        elif name == "OneCycle" and (option in MOMENTUM or (option == "cycle_momentum" and value)):
            reader.report(key, "unsupported", "the momentum has 1 value for the whole run")
        elif not reader.is_unresolved_auto(key):
            options[option] = value
            reader.report(key, "mapped", f"optimizer.lr_schedule_options[{option}]={value}")
    if steps_are_missing:
        return None
    return options
