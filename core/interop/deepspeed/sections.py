"""The keys of a ds_config.json that have a field here, section by section."""

from math import inf, prod

from core.interop.deepspeed.reader import ConfigReader

DTYPES = {"fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16"}
DTYPES |= {"bf16": "bfloat16", "bfloat16": "bfloat16"}
TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
Size = int | None
NEVER = 10**9  # steps


def solve_batch(train: Size, micro: Size, accumulation: Size, ranks: Size) -> tuple[Size, Size]:
    """(global, micro batch size) from train = micro x accumulation x data ranks; None: not determined.

    As in DeepSpeed a size that is not given follows from the others, and accumulation is 1 where nothing determines
    it. Raises ValueError: sizes that contradict each other, with all the numbers.
    """
    factors = {"micro": micro, "accumulation": accumulation, "data ranks": ranks}
    known = {name: size for name, size in factors.items() if size is not None}
    product = prod(known.values())
    product_text = " x ".join(f"{name}({size})" for name, size in known.items())
    if train is None:
        is_determined = micro is not None and ranks is not None
        if not is_determined:
            return None, micro
        return product, micro
    # all four are given: they must agree
    if len(known) == 3 and train != product:
        raise ValueError(
            f"{TRAIN}={train} is not {product_text} = {product}; use {product}, or leave one of the sizes out"
        )
    if train % product:
        below = train // product * product
        if train > product:
            nearest = f"{below} or {below + product}"
        else:
            nearest = f"{product}"
        raise ValueError(
            f"{TRAIN}={train} is no multiple of {product_text} = {product}; use {nearest}"
        )
    if micro is None and ranks is not None:
        micro = train // product
    return train, micro


def batch(reader: ConfigReader) -> None:
    """The three sizes of a batch: global, micro, gradient accumulation."""
    train, micro, accumulation = (reader.value(key, int) for key in (TRAIN, MICRO, ACCUMULATION))
    for key, value in ((TRAIN, train), (MICRO, micro), (ACCUMULATION, accumulation)):
        if value is not None and value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    # sizes that Hugging Face's Trainer fills in are not solved here
    is_open = any(reader.is_unresolved_auto(key) for key in (MICRO, ACCUMULATION, TRAIN))
    if not is_open:
        train, micro = solve_batch(train, micro, accumulation, reader.data_ranks)

    if micro is not None:
        reader.map_to(MICRO, "training", micro_batch_size=micro)
    if train is not None:
        reader.map_to(TRAIN, "training", global_batch_size=train)
    elif micro is not None and not is_open:
        reader.report(
            TRAIN, "unsupported", "it is micro x accumulation x data ranks: give data_ranks"
        )

    # accumulation has no field here: it follows from the other two
    if accumulation is None:
        return
    if train is not None and micro is not None:
        reader.report(
            ACCUMULATION, "mapped", "follows: global_batch_size / (micro_batch_size x data ranks)"
        )
    elif is_open:
        reason = "the sizes are left to Hugging Face's Trainer: our defaults or your flags hold, or give auto={...}"
        reader.report(ACCUMULATION, "ignored" if accumulation == 1 else "unsupported", reason)
    else:
        reason = "global_batch_size says it, and is not known: give data_ranks and the sizes"
        reader.report(ACCUMULATION, "unsupported", reason)


def zero(reader: ConfigReader) -> None:
    """ZeRO's stage, offload, buckets and copies."""
    section = "zero_optimization"
    # the form of early versions
    if isinstance(reader.unread.get(section), bool):
        reader.map_to(section, "data_parallel", zero_stage=int(reader.value(section)))
    elif not reader.is_unresolved_auto(f"{section}.stage"):
        stage = reader.value(f"{section}.stage", int)
        reader.map_to(f"{section}.stage", "data_parallel", zero_stage=0 if stage is None else stage)

    _offload(reader)
    bucket_size = reader.value(f"{section}.reduce_bucket_size", int)
    if bucket_size is not None:  # 0 means each parameter by itself
        reader.map_to(
            f"{section}.reduce_bucket_size", "data_parallel", bucket_size=max(1, bucket_size)
        )
    reader.map_field(f"{section}.overlap_comm", "data_parallel", "overlap", bool)

    # MiCS: shards within groups of ranks, copies across them
    key = f"{section}.mics_shard_size"
    shard_size = reader.value(key, int)
    ranks = reader.data_ranks
    if shard_size is None:
        return
    if shard_size < 1:
        reader.report(key, "ignored", "it is off")
    elif ranks is None:
        reader.report(key, "unsupported", "parallel.replicate is data ranks / it: give data_ranks")
    elif ranks % shard_size:
        raise ValueError(f"{key}={shard_size} does not divide {ranks} data ranks; use a divisor")
    else:
        reader.map_to(key, "parallel", replicate=ranks // shard_size)


def _offload(reader: ConfigReader) -> None:
    """Where optimizer states live: on the device, in host memory, or in files."""
    section = "zero_optimization.offload_optimizer"
    old_key = "zero_optimization.cpu_offload"
    device = reader.value(f"{section}.device", str)
    if device == "cpu" or (device is None and reader.value(old_key)):
        key = f"{section}.device" if device else old_key
        reader.map_to(key, "data_parallel", offload="optimizer")
    elif device == "nvme":
        path = reader.value(f"{section}.nvme_path", str)
        if path is None:
            raise ValueError(
                f"{section}.device=nvme needs 1 nvme_path for its files, 0 given; give one"
            )
        reader.map_to(f"{section}.device", "data_parallel", offload="optimizer")
        reader.map_to(f"{section}.nvme_path", "data_parallel", offload_directory=path)

    offloads = "offload" in reader.fields.get("data_parallel", {})
    for key in list(reader.unread):
        if key == old_key or (key.startswith(section) and not offloads):
            reader.report(key, "ignored", "it is off")
    if offloads:
        reader.map_field(f"{section}.ratio", "data_parallel", "offload_fraction", float)
        if f"{section}.nvme_path" in reader.unread:
            reader.report(f"{section}.nvme_path", "ignored", "offload_optimizer.device=cpu")
        if f"{section}.buffer_size" in reader.unread:
            reader.report(f"{section}.buffer_size", "ignored", "buffers are as large as buckets")


def dtypes(reader: ConfigReader) -> None:
    """Mixed precision: types of weights and gradient sums, and the loss scale."""
    bf16 = "bfloat16" if "bfloat16.enabled" in reader.unread else "bf16"
    enabled_dtypes = {name: bool(reader.value(f"{name}.enabled", bool)) for name in ("fp16", bf16)}
    if all(enabled_dtypes.values()):
        raise ValueError(
            f"fp16.enabled and {bf16}.enabled are both true: 2 dtypes for 1 model; give one of them"
        )
    for name, enabled in enabled_dtypes.items():
        if f"{name}.enabled" in reader.unread and not reader.is_unresolved_auto(f"{name}.enabled"):
            fields = {"fp16" if name == "fp16" else "bf16": enabled}
            reader.map_to(f"{name}.enabled", "model", note="", **fields)
            off_keys = [key for key in reader.unread if key.startswith(f"{name}.") and not enabled]
            for key in off_keys:
                reader.report(key, "ignored", "it is off")
    _loss_scale(reader)

    # gradient sums and main weights
    if reader.value(f"{bf16}.bf16_master_weights_and_grads", bool):
        reader.fields.setdefault("data_parallel", {})["grad_dtype"] = "bfloat16"
        reader.map_to(f"{bf16}.bf16_master_weights_and_grads", "optimizer", main_params=False)
    for key, field in (
        ("data_types.grad_accum_dtype", "grad_dtype"),
        ("communication_data_type", "reduce_dtype"),
    ):
        name = reader.value(key, str)
        if name is not None and name not in DTYPES:
            raise ValueError(f"{key}={name!r} is unknown; known: {', '.join(DTYPES)}")
        if name is not None:
            reader.map_to(key, "data_parallel", **{field: DTYPES[name]})


def _loss_scale(reader: ConfigReader) -> None:
    """The loss scale of float16, which DeepSpeed gives as a power of two."""
    scale = reader.value("fp16.loss_scale", float)
    power = reader.value("fp16.initial_scale_power", int)
    if scale:  # a fixed one; ours is dynamic
        reader.fields.setdefault("optimizer", {})["initial_loss_scale"] = scale
        reader.report(
            "fp16.loss_scale", "unsupported", f"the scale follows overflows; it begins at {scale:g}"
        )
        if power is not None:
            reader.report("fp16.initial_scale_power", "ignored", "fp16.loss_scale is given")
    else:
        if scale is not None:
            reader.report(
                "fp16.loss_scale", "mapped", "0: the scale follows overflows, as always here"
            )
        if power is not None:
            reader.map_to("fp16.initial_scale_power", "optimizer", initial_loss_scale=2.0**power)
    reader.map_field("fp16.loss_scale_window", "optimizer", "loss_scale_window", int)
    minimum = reader.value("fp16.min_loss_scale", float)
    if minimum is not None:
        reason = "the scale stops at 1; optimizer.max_skipped_steps ends a run that overflows there"
        reader.report_support("fp16.min_loss_scale", minimum == 1, reason)


def others(reader: ConfigReader) -> None:
    """Gradient clipping, monitors, logging, and sizes of the other axes."""
    clip = reader.value("gradient_clipping", float)
    max_norm = reader.value("optimizer.params.max_grad_norm", float)
    if max_norm is not None:
        reader.map_to("optimizer.params.max_grad_norm", "optimizer", clip_grad=max_norm)
    if clip is not None or (
        max_norm is None and not reader.is_unresolved_auto("gradient_clipping")
    ):
        note = ""
        if clip is None:
            clip = 1.0
            note = ", DeepSpeed's default (in older versions 0): better say it"
        reader.map_to("gradient_clipping", "optimizer", clip_grad=clip, note=note)
    _monitors(reader)
    key = "steps_per_print"
    if reader.value(key) is not None:
        steps = NEVER
        if reader.value(key, float) not in (0, inf):
            steps = reader.value(key, int)
        reader.map_to(key, "training", log_interval=steps)
    reader.map_field("tensor_parallel.autotp_size", "parallel", "tensor", int)
    reader.map_field("pipeline.stages", "parallel", "pipeline", int)
    op = reader.value("gradient_allreduce_op", str)
    if op is not None:
        reader.report_support(
            "gradient_allreduce_op", op == "mean", "the loss is a mean over tokens"
        )
    layers = reader.value("pipeline.activation_checkpoint_interval", int)
    if layers:
        reader.map_to("pipeline.activation_checkpoint_interval", "training", recompute="layer")
    elif layers is not None:
        reader.report("pipeline.activation_checkpoint_interval", "ignored", "it is off")


def _monitors(reader: ConfigReader) -> None:
    """TensorBoard and Weights & Biases, and where they write."""
    for section, fields, reason in (
        ("tensorboard", {"tensorboard": True}, "curves go into training.output"),
        (
            "wandb",
            {"wandb_project": reader.value("wandb.project", str) or "deepspeed"},
            "the environment says it: WANDB_*",
        ),
    ):
        is_enabled = reader.value(f"{section}.enabled", bool)
        if is_enabled:
            reader.map_to(f"{section}.enabled", "training", **fields)
        if f"{section}.project" in reader.unread and is_enabled:
            reader.report(
                f"{section}.project", "mapped", f"training.wandb_project={fields['wandb_project']}"
            )
        for key in [key for key in reader.unread if key.startswith(f"{section}.")]:
            reader.report(key, "ignored", reason if is_enabled else "it is off")
