"""Rules between the parts of a run, told all at once, before any process group exists."""

from collections.abc import Iterator
from pathlib import Path

import torch

from core.datasets import TokenFile
from core.dist_checkpointing.root import Root
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelConfig
from core.parallel_state.config import divisors, raise_all
from core.training.config import (
    CheckpointConfig,
    DataConfig,
    DataParallelConfig,
    ModelConfig,
    PipelineConfig,
    TrainingConfig,
)
from core.transformer.rules import layout_rules

Rules = Iterator[tuple[bool, str]]


def run_rules(
    model: ModelConfig,
    parallel: ParallelConfig,
    data: DataConfig,
    training: TrainingConfig,
    pipeline: PipelineConfig,
) -> Rules:
    """(holds, message) of every rule; those about the batch need the data size of `parallel`."""
    try:
        config = model.transformer()
    except ValueError as error:
        yield False, str(error)
    else:
        yield from layout_rules(config, parallel)
        yield (
            model.style != "llama" or config.head_size % 2 == 0,
            f"style=llama rotates pairs of dims, hidden_size={model.hidden_size} / num_attention_heads="
            f"{model.num_attention_heads} is {config.head_size}; use an even number of dims per head",
        )
    if parallel.data is not None:
        yield _batch_rule(training, parallel.data)
    s, tp = data.sequence_length, parallel.tensor
    yield (
        not parallel.sequence_parallel or s % tp == 0,
        f"sequence_length={s} does not divide over tensor={tp}, as sequence_parallel needs; use {-(-s // tp) * tp}",
    )
    yield from _file_rules(data)
    stages = len(pipeline.placement(parallel.pipeline)) if parallel.pipeline > 1 else 1
    yield (
        stages <= max(model.num_layers, parallel.pipeline),  # fewer layers than ranks is told above
        f"schedule={pipeline.schedule} has {stages} stages over pipeline={parallel.pipeline} ranks, num_layers="
        f"{model.num_layers} cannot fill them; use at least {stages} layers, or a schedule with one stage per "
        "rank, as 1f1b",
    )
    yield (
        parallel.pipeline > 1 or training.recompute != "stage",
        "recompute=stage is an action of a pipeline's schedule, pipeline=1 has 0 of them; use recompute=layer",
    )


def _batch_rule(training: TrainingConfig, ranks: int) -> tuple[bool, str]:
    batch, micro = training.global_batch_size, training.micro_batch_size
    step = micro * ranks
    valid = [d for d in divisors(batch) if batch % (d * ranks) == 0]
    return (
        batch % step == 0,
        f"global_batch_size={batch} is not a multiple of micro_batch_size={micro} x data({ranks}) = {step}; use "
        f"{-(-batch // step) * step}, or a micro_batch_size of "
        f"{', '.join(map(str, valid)) or 'none: the batch does not divide over the data axis'}",
    )


def _file_rules(data: DataConfig) -> Rules:
    """What the headers of the user's own files say; opening one costs the same at any size."""
    s = data.sequence_length
    for name, prefix in (("train", data.train), ("valid", data.valid)):
        if prefix is None:
            continue
        try:
            tokens = TokenFile(prefix).num_tokens
        except (ValueError, OSError) as error:
            yield False, str(error)
        else:
            yield (
                s < tokens,
                f"sequence_length={s} needs {s + 1} tokens (one more to predict), {name}={prefix} has {tokens}; use "
                f"at most {tokens - 1}, or more text",
            )
    if data.tokenizer is not None:
        yield Path(data.tokenizer).is_file(), f"tokenizer={data.tokenizer} is not a file; give a tokenizer.json"


def _checkpoint_rules(checkpoint: CheckpointConfig) -> Rules:
    """What can be seen without opening anything; object stores are asked when they are read."""
    load = checkpoint.load
    if load is not None and "://" not in load:
        yield (
            (Path(load) / "manifest.json").is_file(),
            f"checkpoint.load={load} is no checkpoint: it has no manifest.json; give a step's own directory, as "
            "runs/checkpoints/step-00001000",
        )
    directory = checkpoint.directory
    if checkpoint.resume == "must" and load is None and directory is not None and "://" not in directory:
        steps = len(Root(directory).steps())
        yield steps > 0, f"checkpoint.resume=must, but {directory} has {steps} steps; use auto for a first run"


def _update_rules(
    model: ModelConfig, parallel: ParallelConfig, data_parallel: DataParallelConfig, optimizer: OptimizerConfig
) -> Rules:
    """What the update needs of the dtypes, and of how its states are divided."""
    zero, tensor, muon = data_parallel.zero_stage, parallel.tensor, optimizer.optimizer == "muon"
    yield (
        not muon or (zero == 0 and tensor == 1),
        f"optimizer=muon orthogonalises whole matrices, zero_stage={zero} and tensor={tensor} may cut them; use "
        "zero_stage=0 and tensor=1, or optimizer=adamw",
    )
    yield (
        not muon or data_parallel.offload == "none" or data_parallel.offload_fraction == 0,
        f"optimizer=muon multiplies matrices where its states are, offload_fraction={data_parallel.offload_fraction} "
        "of them would be on the host; use offload=none, or optimizer=adamw",
    )
    yield (
        optimizer.main_params or model.bf16,
        f"main_params=False rounds weights to bfloat16 stochastically, these are {_name(model.dtype)}; use bf16, or "
        "main_params=True",
    )
    for name in ("grad_dtype", "reduce_dtype"):
        yield (
            getattr(data_parallel, name) != "float16" or model.fp16,
            f"{name}=float16 loses what is below 6e-8 where no loss scale lifts it, and weights of "
            f"{_name(model.dtype)} have none; use bfloat16 or float32, or fp16",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_run(
    model: ModelConfig,
    parallel: ParallelConfig,
    data: DataConfig,
    training: TrainingConfig,
    pipeline: PipelineConfig = PipelineConfig(),  # noqa: B008  (frozen)
    checkpoint: CheckpointConfig = CheckpointConfig(),  # noqa: B008
    data_parallel: DataParallelConfig = DataParallelConfig(),  # noqa: B008
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    *,
    world_size: int,
) -> ParallelConfig:
    """The layout with its data size, or one ValueError with everything that does not fit together."""
    rules: list[tuple[bool, str]] = []
    try:
        parallel = parallel.for_world(world_size)
    except ValueError as error:
        rules.append((False, str(error)))
    rules += [*_checkpoint_rules(checkpoint), *_update_rules(model, parallel, data_parallel, optimizer)]
    raise_all("this run", [*rules, *run_rules(model, parallel, data, training, pipeline)])
    return parallel
