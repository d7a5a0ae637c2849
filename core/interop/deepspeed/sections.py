"""What the keys of a ds_config.json are here, section by section."""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

from core.interop.deepspeed.reader import ConfigReader
from core.optimizer import OptimizerConfig
from core.optimizer.schedules.deepspeed import MOMENTUM, SCHEDULES, schedule

DTYPES = {"fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16"}
DTYPES |= {"bf16": "bfloat16", "bfloat16": "bfloat16"}
TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
P = "optimizer.params"
Size = int | None
NEVER = 10**9  # steps
CONSTANT: dict[str, Any] = {"lr_schedule": "constant", "lr_warmup_fraction": 0.0}


def solve_batch(train: Size, micro: Size, accumulation: Size, ranks: Size) -> tuple[Size, Size]:
    """(global, micro batch size) from train = micro x accumulation x data ranks; None: these do not say it.

    As in DeepSpeed a size that is not given follows from the others, and accumulation is 1 where nothing says it.
    Raises ValueError: sizes that contradict each other, with all the numbers.
    """
    given = {"micro": micro, "accumulation": accumulation, "data ranks": ranks}
    known = {name: size for name, size in given.items() if size is not None}
    step, words = prod(known.values()), " x ".join(f"{name}({size})" for name, size in known.items())
    if train is None:
        return (step if micro is not None and ranks is not None else None), micro
    if len(known) == 3 and train != step:
        raise ValueError(f"{TRAIN}={train} is not {words} = {step}; use {step}, or leave one of the sizes out")
    if train % step:
        near = f"{train // step * step} or {train // step * step + step}" if train > step else f"{step}"
        raise ValueError(f"{TRAIN}={train} is no multiple of {words} = {step}; use {near}")
    return train, train // step if micro is None and ranks is not None else micro


def batch(r: ConfigReader) -> None:
    """The three sizes of a batch."""
    train, micro, accumulation = (r.value(key, int) for key in (TRAIN, MICRO, ACCUMULATION))
    for key, value in ((TRAIN, train), (MICRO, micro), (ACCUMULATION, accumulation)):
        if value is not None and value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    left_open = r.unfilled(MICRO) or r.unfilled(ACCUMULATION) or r.unfilled(TRAIN)
    train, micro = (train, micro) if left_open else solve_batch(train, micro, accumulation, r.ranks)
    if micro is not None:
        r.put(MICRO, "training", micro_batch_size=micro)
    if train is not None:
        r.put(TRAIN, "training", global_batch_size=train)
    elif micro is not None and not left_open:
        r.tell(TRAIN, "unsupported", "it is micro x accumulation x data ranks: give data_ranks")
    if accumulation is not None and train is not None and micro is not None:
        r.tell(ACCUMULATION, "mapped", "follows: global_batch_size / (micro_batch_size x data ranks)")
    elif accumulation is not None and left_open:
        words = "the sizes are left to Hugging Face's Trainer: our defaults or your flags hold, or give auto={...}"
        r.tell(ACCUMULATION, "ignored" if accumulation == 1 else "unsupported", words)
    elif accumulation is not None:
        r.tell(
            ACCUMULATION, "unsupported", "global_batch_size says it, and is not known: give data_ranks and the sizes"
        )


def zero(r: ConfigReader) -> None:
    """ZeRO's stage, offload, buckets and copies."""
    z, o = "zero_optimization", "zero_optimization.offload_optimizer"
    if isinstance(r.left.get(z), bool):  # an old form
        r.put(z, "data_parallel", zero_stage=int(r.value(z)))
    elif not r.unfilled(f"{z}.stage"):
        stage = r.value(f"{z}.stage", int)
        r.put(f"{z}.stage", "data_parallel", zero_stage=0 if stage is None else stage)
    device = r.value(f"{o}.device", str)
    if device == "cpu" or (device is None and r.value(f"{z}.cpu_offload")):
        r.put(f"{o}.device" if device else f"{z}.cpu_offload", "data_parallel", offload="optimizer")
    elif device == "nvme":
        path = r.value(f"{o}.nvme_path", str)
        if path is None:
            raise ValueError(f"{o}.device=nvme needs 1 nvme_path for its files, 0 given; give one")
        r.put(f"{o}.device", "data_parallel", offload="optimizer")
        r.put(f"{o}.nvme_path", "data_parallel", offload_directory=path)
    on = "offload" in r.fields.get("data_parallel", {})
    for key in (k for k in list(r.left) if k == f"{z}.cpu_offload" or (k.startswith(o) and not on)):
        r.tell(key, "ignored", "it is off")
    if on:
        r.simple(f"{o}.ratio", "data_parallel", "offload_fraction", float)
        if f"{o}.nvme_path" in r.left:
            r.tell(f"{o}.nvme_path", "ignored", "offload_optimizer.device=cpu")
        if f"{o}.buffer_size" in r.left:
            r.tell(f"{o}.buffer_size", "ignored", "buffers are as large as buckets")
    size = r.value(f"{z}.reduce_bucket_size", int)
    if size is not None:
        r.put(f"{z}.reduce_bucket_size", "data_parallel", bucket_size=max(1, size))  # 0: each parameter by itself
    r.simple(f"{z}.overlap_comm", "data_parallel", "overlap", bool)
    shard = r.value(f"{z}.mics_shard_size", int)
    if shard is not None and shard < 1:
        r.tell(f"{z}.mics_shard_size", "ignored", "it is off")
    elif shard is not None and r.ranks is None:
        r.tell(f"{z}.mics_shard_size", "unsupported", "parallel.replicate is data ranks / it: give data_ranks")
    elif shard is not None and r.ranks is not None:
        if r.ranks % shard:
            raise ValueError(f"{z}.mics_shard_size={shard} does not divide {r.ranks} data ranks; use a divisor")
        r.put(f"{z}.mics_shard_size", "parallel", replicate=r.ranks // shard)


def dtypes(r: ConfigReader) -> None:
    """Types of weights and sums, and the loss scale."""
    bf16 = "bfloat16" if "bfloat16.enabled" in r.left else "bf16"
    on = {name: bool(r.value(f"{name}.enabled", bool)) for name in ("fp16", bf16)}
    if all(on.values()):
        raise ValueError(f"fp16.enabled and {bf16}.enabled are both true: 2 dtypes for 1 model; give one of them")
    for name, enabled in on.items():
        if f"{name}.enabled" in r.left and not r.unfilled(f"{name}.enabled"):
            fields = {"fp16" if name == "fp16" else "bf16": enabled}
            r.put(f"{name}.enabled", "model", note="", **fields)
            for key in [k for k in r.left if k.startswith(f"{name}.") and not enabled]:
                r.tell(key, "ignored", "it is off")
    scale = r.value("fp16.loss_scale", float)
    power = r.value("fp16.initial_scale_power", int)
    if scale:
        r.fields.setdefault("optimizer", {})["initial_loss_scale"] = scale
        r.tell("fp16.loss_scale", "unsupported", f"the scale follows overflows; it begins at {scale:g}")
        if power is not None:
            r.tell("fp16.initial_scale_power", "ignored", "fp16.loss_scale is given")
    else:
        if scale is not None:
            r.tell("fp16.loss_scale", "mapped", "0: the scale follows overflows, as always here")
        if power is not None:
            r.put("fp16.initial_scale_power", "optimizer", initial_loss_scale=2.0**power)
    r.simple("fp16.loss_scale_window", "optimizer", "loss_scale_window", int)
    least = r.value("fp16.min_loss_scale", float)
    if least is not None:
        words = "the scale stops at 1; optimizer.max_skipped_steps ends a run that overflows there"
        r.tell("fp16.min_loss_scale", "mapped" if least == 1 else "unsupported", words)
    if r.value(f"{bf16}.bf16_master_weights_and_grads", bool):
        r.fields.setdefault("data_parallel", {})["grad_dtype"] = "bfloat16"
        r.put(f"{bf16}.bf16_master_weights_and_grads", "optimizer", main_params=False)
    for key, field in (("data_types.grad_accum_dtype", "grad_dtype"), ("communication_data_type", "reduce_dtype")):
        name = r.value(key, str)
        if name is not None and name not in DTYPES:
            raise ValueError(f"{key}={name!r} is unknown; known: {', '.join(DTYPES)}")
        if name is not None:
            r.put(key, "data_parallel", **{field: DTYPES[name]})


def optimizer(r: ConfigReader) -> None:
    """Which update, and its numbers, where nothing is said DeepSpeed's own."""
    name = r.value("optimizer.type", str)
    kinds = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "muon": "muon"}
    if name is not None and name.lower() not in kinds:
        r.tell("optimizer.type", "unsupported", f"known: {', '.join(kinds)}; the optimizer stays ours")
        for key in [k for k in r.left if k.startswith(f"{P}.")]:
            r.tell(key, "unsupported", f"of optimizer.type={name}")
        return
    kind = kinds[name.lower()] if name is not None else None
    plain_adam = name is not None and name.lower() == "adam" and r.value(f"{P}.adam_w_mode") is False
    if kind is not None:
        r.put("optimizer.type", "optimizer", optimizer=kind)
        _decay(r, 0.01 if kind == "adamw" and r.value(f"{P}.torch_adam") and not plain_adam else 0.0, plain_adam)
    if kind == "muon":
        _muon(r)
    r.simple(f"{P}.lr", "optimizer", "lr", float)
    r.simple(f"{P}.eps", "optimizer", "adam_eps", float)
    betas = r.value(f"{P}.betas")
    if betas is not None:
        if not (isinstance(betas, Sequence) and len(betas) == 2):
            raise ValueError(f"{P}.betas={betas!r} must be 2 numbers; give both")
        r.put(f"{P}.betas", "optimizer", adam_beta1=betas[0], adam_beta2=betas[1])
    if kind == "sgd" or f"{P}.momentum" in r.left:
        r.put(f"{P}.momentum", "optimizer", momentum=r.value(f"{P}.momentum", float) or 0.0)
    for key, plain, why in (
        ("bias_correction", True, "moments are always corrected"),
        ("amsgrad", False, "the largest second moment is not kept"),
        ("maximize", False, "the loss is made small"),
        ("nesterov", kind == "muon", "momentum is the plain one, of Muon Nesterov's"),
        ("dampening", 0, "momentum is not dampened"),
    ):
        value = r.value(f"{P}.{key}")
        if value is not None:
            r.tell(f"{P}.{key}", "mapped" if value == plain else "unsupported", why)


def _decay(r: ConfigReader, default: float, plain_adam: bool) -> None:
    """Of every parameter, as in DeepSpeed; `default`: where the file does not say how much."""
    key = f"{P}.weight_decay"
    if r.unfilled(key):
        r.fields["optimizer"]["weight_decay_of"] = "all"
    else:
        decay = r.value(key, float)
        decay = default if decay is None else decay
        r.put(key, "optimizer", weight_decay=decay, **({"weight_decay_of": "all"} if decay else {}))
        if plain_adam and decay:
            r.tell(f"{P}.adam_w_mode", "unsupported", "decay is decoupled; use AdamW, or a decay of 0")
    if f"{P}.adam_w_mode" in r.left:
        r.tell(f"{P}.adam_w_mode", "mapped", "decay is AdamW's" if not plain_adam else "nothing decays")


def _muon(r: ConfigReader) -> None:
    """Keller Jordan's form, as in DeepSpeed: its scale of the rate, and what it and the Adam beside it begin with."""
    r.fields["optimizer"] |= {"muon_lr": "original", "muon_except": "embed,lm_head", "momentum": 0.95}
    r.fields["optimizer"] |= {"adam_beta2": 0.95, "adam_eps": 1e-10}
    one, left_open = r.value(f"{P}.lr", float), r.unfilled(f"{P}.lr")
    muon, adam = (r.value(f"{P}.{key}", float) for key in ("muon_lr", "adam_lr"))
    if muon is not None or not left_open:
        muon, adam = (x if x is not None else one for x in (muon, adam))
        muon, adam = 0.02 if muon is None else muon, 3e-4 if adam is None else adam
        r.put(f"{P}.muon_lr" if f"{P}.muon_lr" in r.left else f"{P}.lr", "optimizer", lr=muon)
        if adam != muon:
            words = f"1 rate for all, {muon:g}; for {adam:g} beside it"
            r.tell(f"{P}.adam_lr", "unsupported", f"{words} ShardedMuon(groups=[{{'names': ..., 'lr': ...}}])")
        for key in ("lr", "adam_lr"):
            if f"{P}.{key}" in r.left:
                r.tell(f"{P}.{key}", "mapped", f"optimizer.lr={muon}")
    if f"{P}.ns_method" in r.left:
        r.tell(f"{P}.ns_method", "ignored", "five steps of Newton and Schulz, in torch.optim.Muon's form")
    stage = r.fields.get("data_parallel", {}).get("zero_stage", 0)
    if stage:
        r.fields["data_parallel"]["zero_stage"] = 0
        words = f"Muon multiplies whole matrices: data_parallel.zero_stage=0 instead of {stage}, the same numbers"
        r.tell("zero_optimization.stage", "unsupported", words, value=stage)


def scheduler(r: ConfigReader) -> None:
    """One of the five schedules, if all its numbers are known."""
    name, prefix = r.value("scheduler.type", str), "scheduler.params."
    keys = [key for key in r.left if key.startswith(prefix)]
    if name is None and r.fields.get("optimizer", {}).get("optimizer") is None:
        return  # both are the script's
    r.fields.setdefault("optimizer", {}).update(CONSTANT)  # a run's default is not
    if name is None:
        r.tell("scheduler.type", "mapped", "optimizer.lr_schedule=constant")
        return
    if name not in SCHEDULES:
        r.tell("scheduler.type", "unsupported", f"known: {', '.join(SCHEDULES)}; the rate is constant")
        for key in keys:
            r.tell(key, "unsupported", f"of scheduler.type={name}")
        return
    options: dict[str, Any] = {}
    missing = False
    for key in keys:
        option, value = key.removeprefix(prefix), r.value(key)
        if option == "last_batch_iteration":
            words = "the optimizer's step count is where the schedule is"
            r.tell(key, "ignored" if value in (None, -1) else "unsupported", words)
        elif r.unfilled(key) and option.endswith("num_steps"):
            missing = True
            r.tell(key, "unsupported", f"left to Hugging Face's Trainer: give auto={{{key!r}: ...}}")
        elif r.unfilled(key) and (name, option) == ("WarmupDecayLR", "warmup_max_lr"):
            options[option] = "auto"  # Trainer's rate; without a word it is 0.001
            r.tell(key, "mapped", "optimizer.lr_schedule_options[warmup_max_lr]=auto, optimizer.lr")
        elif name == "OneCycle" and (option in MOMENTUM or (option == "cycle_momentum" and value)):
            r.tell(key, "unsupported", "the momentum has 1 value for the whole run")
        elif not r.unfilled(key):
            options[option] = value
            r.tell(key, "mapped", f"optimizer.lr_schedule_options[{option}]={value}")
    if missing:
        r.tell("scheduler.type", "unsupported", "its number of steps is not known; the rate is constant")
        return
    if name == "OneCycle" and "scheduler.params.cycle_momentum" not in keys:
        r.tell("scheduler.params.cycle_momentum", "unsupported", "the momentum has 1 value for the whole run")
    schedule(name, options, r.fields.get("optimizer", {}).get("lr", OptimizerConfig().lr))
    r.fields.setdefault("optimizer", {})["lr_schedule_options"] = options
    r.put("scheduler.type", "optimizer", lr_schedule=name)


def others(r: ConfigReader) -> None:
    """What stands by itself."""
    clip, inner = r.value("gradient_clipping", float), r.value("optimizer.params.max_grad_norm", float)
    if inner is not None:
        r.put("optimizer.params.max_grad_norm", "optimizer", clip_grad=inner)
    if clip is not None or (inner is None and not r.unfilled("gradient_clipping")):
        note = "" if clip is not None else ", DeepSpeed's default (in older versions 0): better say it"
        r.put("gradient_clipping", "optimizer", clip_grad=1.0 if clip is None else clip, note=note)
    _monitors(r)
    key = "steps_per_print"
    if r.value(key) is not None:
        never = r.value(key, float) in (0, inf)
        r.put(key, "training", log_interval=NEVER if never else r.value(key, int))
    r.simple("tensor_parallel.autotp_size", "parallel", "tensor", int)
    r.simple("pipeline.stages", "parallel", "pipeline", int)
    op = r.value("gradient_allreduce_op", str)
    if op is not None:
        r.tell("gradient_allreduce_op", "mapped" if op == "mean" else "unsupported", "the loss is a mean over tokens")
    layers = r.value("pipeline.activation_checkpoint_interval", int)
    if layers:
        r.put("pipeline.activation_checkpoint_interval", "training", recompute="layer")
    elif layers is not None:
        r.tell("pipeline.activation_checkpoint_interval", "ignored", "it is off")


def _monitors(r: ConfigReader) -> None:
    """TensorBoard and Weights & Biases, and where their curves go."""
    for section, fields, words in (
        ("tensorboard", {"tensorboard": True}, "curves go into training.output"),
        (
            "wandb",
            {"wandb_project": r.value("wandb.project", str) or "deepspeed"},
            "the environment says it: WANDB_*",
        ),
    ):
        on = r.value(f"{section}.enabled", bool)
        if on:
            r.put(f"{section}.enabled", "training", **fields)
        if f"{section}.project" in r.left and on:
            r.tell(f"{section}.project", "mapped", f"training.wandb_project={fields['wandb_project']}")
        for key in [k for k in r.left if k.startswith(f"{section}.")]:
            r.tell(key, "ignored", words if on else "it is off")
