"""Rules between the parts of a run: every broken one is reported at once, before any process group exists."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from core.datasets import TokenFile, open_blend
from core.datasets.corpus.cached import is_text
from core.datasets.corpus.hub import hub_remedy
from core.datasets.shards.manifest import ShardManifest, is_list
from core.models.lora.config import LoraConfig
from core.optimizer.config import NEEDS_STATES_AT_HAND, OptimizerConfig
from core.parallel_state.config import ParallelConfig, divisors, raise_all
from core.parallel_state.context import wrong_length
from core.training.config.adapters import lora_rules
from core.training.config.checkpoints import checkpoint_rules
from core.training.config.data import DataConfig
from core.training.config.parts import (
    CheckpointConfig,
    DataParallelConfig,
    PipelineConfig,
    TrainingConfig,
)
from core.training.functions import function_of
from core.training.model import folder
from core.training.model.config import ModelConfig
from core.training.preferences.rules import dpo_rules, objective_rules
from core.transformer.rules import layout_rules

Rules = Iterator[tuple[bool, str]]

# of a model whose layers nobody here can count
_MOST_STAGES = 1 << 14


def _model_rules(model: ModelConfig, parallel: ParallelConfig) -> Rules:
    """Sizes of layers, and how tensor and pipeline ranks divide them."""
    if model.build is not None:  # its sizes are its own affair
        try:
            function_of(model.build)
        except ValueError as error:
            yield False, f"model.build={error}"
        return
    # a model that is wrong by itself has no sizes to divide: its mistake alone is reported
    try:
        config = model.transformer()
        rotates = model.spec().rotary is not None
    except ValueError as error:
        yield False, f"model: {str(error).removeprefix('TransformerConfig: ')}"
        return
    yield from layout_rules(config, parallel)
    # as Rotary counts them
    rotated = int(config.rotary_size * config.rotary_percent)
    share = ""
    if config.rotary_percent < 1:
        share = f" x rotary_percent={config.rotary_percent}"
    yield (
        not rotates or (rotated > 0 and rotated % 2 == 0),
        f"rotary positions rotate pairs of dims, hidden_size={config.hidden_size} with num_attention_heads="
        f"{config.num_attention_heads} has heads of {config.head_size}{share}; use an even number of dims per head "
        "(model.kv_channels)",
    )


def _position_rules(model: ModelConfig, data: DataConfig) -> Rules:
    """Rows are no longer than the model has positions."""
    if model.build is not None:
        return
    try:
        positions = model.positions(data.sequence_length)
    except ValueError:
        # a folder that cannot be read, which the rules of the model tell
        return
    yield (
        data.sequence_length <= positions,
        f"data.sequence_length={data.sequence_length} is more than the model's {positions} positions; use at most "
        f"{positions}, or a model with more",
    )


def _folder_rules(
    model: ModelConfig, lora: LoraConfig, data: DataConfig, checkpoint: CheckpointConfig
) -> Rules:
    """A Hugging Face folder, or a checkpoint's weights, are looked at where a run begins with them."""
    yield from folder.text_rules(model, data.train, data.tokenizer)
    if model.huggingface is None and checkpoint.weights is None:
        return
    try:
        # a run that goes on reads neither, unless it kept adapters alone, which need the weights beside them
        if checkpoint.resumes() and (lora.rank is None or lora.save_base):
            return
    except (ValueError, OSError) as error:
        yield False, f"checkpoint.directory={checkpoint.directory}: {error}"
        return
    if checkpoint.weights is None:
        yield from folder.weight_rules(model, data.sequence_length)
    elif (Path(checkpoint.weights) / "manifest.json").is_file() and model.build is None:
        # here, so that a run without them is read without the code that trains
        from core.training.model.weights import weights_rules

        yield from weights_rules(
            model, str(checkpoint.weights), _tokens_of(data), data.sequence_length
        )


def _tokens_of(data: DataConfig) -> int | None:
    """How many tokens the text's tokenizer has, if a card beside the text says so."""
    try:
        prefix = open_blend(data.train)[0][1] if data.train else None
        if prefix is None or is_text(prefix) or is_list(prefix):
            return None
        card = TokenFile(prefix).card
    except (ValueError, OSError):  # reported by `_file_rules`
        return None
    if card is not None:
        return card.vocab_size
    return None


def _batch_rules(training: TrainingConfig, parallel: ParallelConfig) -> Rules:
    """The batch divides over data ranks and microbatches; checked once the number of data ranks is known."""
    # None until the size of the world is known
    ranks = parallel.data
    if ranks is not None and training.global_batch_size % (training.micro_batch_size * ranks):
        yield False, _describe_batch_mismatch(training, ranks)
    if ranks is not None and training.ramp is not None:
        step = training.micro_batch_size * ranks
        for name, rows in zip(("start", "increment"), training.ramp, strict=False):
            yield (
                rows % step == 0,
                f"rampup_batch_size: {name}={rows} is not a multiple of micro_batch_size={training.micro_batch_size} "
                f"x data({ranks}) = {step}; use {max(step, rows // step * step)}",
            )


def _describe_batch_mismatch(training: TrainingConfig, ranks: int) -> str:
    """Both numbers, the nearest batches that divide, and the microbatches that would."""
    batch = training.global_batch_size
    micro = training.micro_batch_size
    step = micro * ranks
    # the nearest batches that do divide
    below = batch // step * step
    above = -(-batch // step) * step
    remedy = f"{below} or {above}" if below else f"{above}"
    # with this batch, other microbatches may divide
    if batch % ranks == 0:
        by_distance = sorted(divisors(batch // ranks), key=lambda divisor: abs(divisor - micro))
        nearest = sorted(by_distance[:8])
        remedy += f", or a micro_batch_size of {', '.join(map(str, nearest))}"
    return (
        f"global_batch_size={batch} is not a multiple of micro_batch_size={micro} x data({ranks}) = {step}; use "
        f"{remedy}"
    )


def batch_solved(training: TrainingConfig, parallel: ParallelConfig) -> str:
    """`global_batch_size 256 = micro_batch_size 4 x accumulation 8 x data 8`. Needs `parallel.data`.

    Raises ValueError: the batch does not divide; with the nearest values that do.
    """
    assert parallel.data is not None, "call for_world first"
    raise_all("the batch", _batch_rules(training, parallel))
    batch = training.global_batch_size
    micro = training.micro_batch_size
    ranks = parallel.data
    accumulation = batch // micro // ranks
    return f"global_batch_size {batch} = micro_batch_size {micro} x accumulation {accumulation} x data {ranks}"


def _sequence_rules(data: DataConfig, parallel: ParallelConfig) -> Rules:
    length = data.sequence_length
    ranks = parallel.tensor
    context = parallel.context
    wrong = wrong_length(length, context)
    yield wrong is None, f"data.sequence_length: {wrong}"
    next_multiple = -(-length // (context * ranks)) * context * ranks
    yield (
        not parallel.sequence_parallel or length % (context * ranks) == 0,
        f"sequence_length={length} does not divide over "
        + (f"context={context} x " if context > 1 else "")
        + f"tensor={ranks}, as sequence_parallel needs; use {next_multiple}",
    )


def _file_rules(data: DataConfig) -> Rules:
    """The user's own token files exist and are long enough; opening one costs the same at any size."""
    length = data.sequence_length
    sets = [(f"valid_sets.{name}", (prefix,)) for name, prefix in data.valid_sets.items()]
    for name, blend in (("train", data.train), ("valid", data.valid), *sets):
        if "" in blend:  # told by `DataConfig`
            continue
        try:
            for _, prefix in open_blend(blend) if blend else ():
                # becomes a token file when everything else fits together
                if is_text(prefix):
                    continue
                source = ShardManifest.read(prefix) if is_list(prefix) else TokenFile(prefix)
                tokens = source.num_tokens
                yield (
                    # one more, for the last label; a validation text may be short, as conversations may: they are
                    # packed into rows that are filled up
                    length < tokens or name != "train" or getattr(source, "marks_answers", False),
                    f"sequence_length={length} needs {length + 1} tokens (one more to predict), {name}={prefix} has "
                    f"{tokens}; use at most {tokens - 1}, or more text",
                )
        except FileNotFoundError as error:
            yield False, f"{error}{hub_remedy(prefix)}"
        except (ValueError, OSError) as error:
            yield False, str(error)
    if data.tokenizer is not None:
        yield (
            Path(data.tokenizer).is_file(),
            f"tokenizer={data.tokenizer} is not a file; give a tokenizer.json",
        )


def _stage_rules(model: ModelConfig, parallel: ParallelConfig, pipeline: PipelineConfig) -> Rules:
    try:
        num_layers = model.layers
    except ValueError:  # reported by `_model_rules`
        return
    own_model = model.build is not None
    # fewer layers than ranks: reported by `layout_rules`
    if not 1 < parallel.pipeline <= (_MOST_STAGES if own_model else num_layers):
        return
    # interleaved schedules have several stages per rank, each of at least one layer
    try:
        stages = len(pipeline.placement(parallel.pipeline))
    except Exception as error:
        # of a function of the user's, which may raise anything
        yield (
            False,
            f"schedule={pipeline.schedule} over pipeline={parallel.pipeline} ranks: {error}",
        )
        return
    yield (
        own_model or stages <= num_layers,
        f"schedule={pipeline.schedule} has {stages} stages over pipeline={parallel.pipeline} ranks, num_layers="
        f"{num_layers} cannot fill them; use at least {stages} layers, or a schedule with one stage per "
        "rank, as 1f1b",
    )


def _ramp_rules(
    training: TrainingConfig, parallel: ParallelConfig, pipeline: PipelineConfig
) -> Rules:
    yield (
        training.ramp is None or parallel.pipeline == 1 or pipeline.schedule != "auto",
        f"schedule=auto is searched for one number of microbatches, rampup_batch_size="
        f"{' '.join(training.rampup_batch_size)} has several; use a schedule by name",
    )


def _recompute_rules(training: TrainingConfig, parallel: ParallelConfig) -> Rules:
    yield (
        parallel.pipeline > 1 or training.recompute != "stage",
        "recompute=stage is an action of a pipeline's schedule, pipeline=1 has none; use recompute=layer",
    )


def _export_rules(model: ModelConfig, data: DataConfig, checkpoint: CheckpointConfig) -> Rules:
    """What cannot be exported when the run ends is told before it begins."""
    if checkpoint.export_huggingface is not None:
        yield from folder.export_rules(model, data.sequence_length, checkpoint.export_huggingface)


def _update_rules(
    model: ModelConfig,
    data_parallel: DataParallelConfig,
    optimizer: OptimizerConfig,
) -> Rules:
    """Some optimizers need their states at hand; stochastic rounding and loss scales (mixed precision) dtypes."""
    yield (
        optimizer.optimizer not in NEEDS_STATES_AT_HAND
        or data_parallel.offload == "none"
        or data_parallel.offload_fraction == 0,
        f"optimizer={optimizer.optimizer} takes parameters as a whole where its states are, offload_fraction="
        f"{data_parallel.offload_fraction} of them would be on the host; use offload=none, or optimizer=adamw",
    )
    yield (
        optimizer.main_params or model.bf16,
        f"main_params=False rounds weights to bfloat16 stochastically, these are {_dtype_name(model.dtype)}; "
        "use bf16, or main_params=True",
    )
    for name in ("grad_dtype", "reduce_dtype"):
        yield (
            getattr(data_parallel, name) != "float16" or model.fp16,
            f"{name}=float16 loses what is below 6e-8 where no loss scale lifts it, and weights of "
            f"{_dtype_name(model.dtype)} have none; use bfloat16 or float32, or fp16",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# each group of rules with the parts of a run that it needs: it is checked even if other parts are wrong
_RULES: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("checkpoint",), checkpoint_rules),
    (("model", "data_parallel", "optimizer"), _update_rules),
    (("model", "parallel"), _model_rules),
    (("model", "data"), _position_rules),
    (("model", "lora", "data"), lora_rules),
    (("model", "lora", "data", "checkpoint"), _folder_rules),
    (("model", "data", "reads_text"), folder.corpus_rules),
    (("model", "data", "checkpoint"), _export_rules),
    (("training", "parallel"), _batch_rules),
    (("data", "parallel"), _sequence_rules),
    (("data",), _file_rules),
    (("training", "data"), objective_rules),
    (("training", "model", "parallel", "checkpoint"), dpo_rules),
    (("model", "parallel", "pipeline"), _stage_rules),
    (("training", "parallel"), _recompute_rules),
    (("training", "parallel", "pipeline"), _ramp_rules),
)


def run_rules(parts: Mapping[str, Any]) -> Rules:
    """(holds, message) of every rule whose parts are all there; those about the batch need `parallel.data`.

    parts: "model", "parallel", ... -> that part; and "reads_text", as `RunConfig.check` has it.
    """
    parts = {"reads_text": True, **parts}
    for needed, rules in _RULES:
        # a part that is wrong by itself is left out; the rules of the others still speak
        if parts.keys() >= set(needed):
            yield from rules(*(parts[name] for name in needed))


def in_world(
    parallel: ParallelConfig, world_size: int
) -> tuple[ParallelConfig, list[tuple[bool, str]]]:
    """The layout with its data size, and the rule that the world broke, if any."""
    try:
        return parallel.for_world(world_size), []
    except ValueError as error:
        return parallel, [(False, str(error))]


def check_run(
    model: ModelConfig,
    parallel: ParallelConfig,
    data: DataConfig,
    training: TrainingConfig,
    pipeline: PipelineConfig = PipelineConfig(),  # noqa: B008  (frozen)
    checkpoint: CheckpointConfig = CheckpointConfig(),  # noqa: B008
    data_parallel: DataParallelConfig = DataParallelConfig(),  # noqa: B008
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
    lora: LoraConfig = LoraConfig(),  # noqa: B008
    *,
    world_size: int,
) -> ParallelConfig:
    """The layout with its data size, or one ValueError with everything that does not fit together."""
    parallel, broken_rules = in_world(parallel, world_size)
    parts = {
        "model": model,
        "parallel": parallel,
        "data": data,
        "training": training,
        "pipeline": pipeline,
        "checkpoint": checkpoint,
        "data_parallel": data_parallel,
        "optimizer": optimizer,
        "lora": lora,
    }
    raise_all("this run", [*broken_rules, *run_rules(parts)])
    return parallel
