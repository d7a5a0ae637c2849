"""One call from a configuration to what a training loop needs, as `deepspeed.initialize` gives it."""

import atexit
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from core.dist_checkpointing.planning.ranks import from_first
from core.models.gpt import GPTModel
from core.models.lora import LoraConfig, apply_lora
from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState, current_state, model_parallel_is_initialized
from core.parallel_state.collectives.groups import destroy_world, is_initialized, world
from core.parallel_state.environment import join_world, started_processes
from core.pipeline import LossFn
from core.training.config import RunConfig, same_on_all_ranks
from core.training.config.sources import run_of
from core.training.config.texts import with_token_files
from core.training.model.begin import begin
from core.training.model.own import refuse_own_rows
from core.training.model.weights import load_weights
from core.training.preferences.reference import first_batches
from core.training.resume.batch_plan import PlannedBatches
from core.training.resume.same_run import refuse_another_run
from core.training.run.assembly import assemble
from core.training.run.data import BatchSource, Corpus, note_on_tokenizer, open_corpus
from core.training.run.engine.text_of_run import reads_text
from core.training.run.engine.their_arguments import answers_theirs
from core.training.run.engine.training_model import TrainingModel
from core.training.run.evaluate import next_token_loss
from core.training.run.loader import Loader, NoBatches, Scheduler
from core.transformer.attention.kernels import use_deterministic


class Initialized(NamedTuple):
    """What `initialize` returns; unpack it. loader is false for a model that is no GPT, with neither `batches` nor
    `data.train`."""

    model: TrainingModel
    optimizer: ShardedOptimizer
    scheduler: Scheduler
    loader: Loader


@answers_theirs
def initialize(
    model: nn.Module | Mapping[int, nn.Module] | None = None,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    batches: BatchSource | None = None,
    loss_fn: LossFn | None = next_token_loss,
) -> Initialized:
    """Model, optimizer, scheduler and data loader of a run, each usable alone, on one process or under torchrun.

    model: any module, or stage -> module of this rank; default: the GPT that `config.model` describes. A module of
        your own is copied from the first data rank to the others, in 16 bits where `config.model` says so, and stays
        the object that you hold.
    config: a `RunConfig`, nested dicts of its fields, or the path of a TOML file.
    batches: what the loader reads; default: the text that `config.data` names, for a GPT, or for another module that
        takes `tokens`, and without `loss_fn` `labels`, to give losses [b, s].
    loss_fn(output, microbatch) -> (sum of losses, number of tokens), for `train_step`; a GPT puts out losses [b, s].

    A run that `config.checkpoint` says goes on has done so: `loader.step` and `optimizer.step_count` say from where;
    `train_step` saves as it says. What `config.training` says of logs, validation, profile and output is for your
    loop. Joins torchrun's world if nobody did, and leaves it at exit. Collective: every rank calls it.
    Raises ValueError: everything in the configuration that does not fit together, before a process group exists; a
    field that another rank has otherwise; a model built for another layout or vocabulary.
    """
    _refuse_swapped_arguments(model, batches)
    joins_world = not is_initialized()
    world_size = started_processes() if joins_world else world()[1]
    run = _checked_run(_run_config(config, model), model, world_size, reads_text=batches is None)
    has_text = reads_text(run, model, batches, loss_fn)
    # its mistakes are reported before any process group exists
    device = _join_world(run, joins_world=joins_world)
    ps = _parallel_state(run, model, device)
    if joins_world:
        atexit.register(_leave_groups, ps)

    corpus = _open_text(run, model, ps) if has_text else None
    stages = _build_stages(run, model, corpus, ps)
    say = _say_on_first_rank(ps)
    _, optimizer, executor, checkpoints, preferences = assemble(stages, run, corpus, ps, say)
    # before the loader is made, which begins with the batch after the checkpoint's
    start = checkpoints.resume()
    source = batches
    if corpus is not None:
        source = first_batches(corpus, preferences, executor, start, say)
    loss_of_run = preferences.loss if preferences is not None else loss_fn or _no_loss
    training_model = TrainingModel(
        stages, optimizer, executor, checkpoints, loss_of_run, run.training
    )
    if isinstance(config, Mapping) and "micro_batch_size" not in config.get("training", {}):
        # as in DeepSpeed: without a microbatch size every `step` updates
        training_model.accumulation = 1
    if source is not None:
        training_model.loader = _loader(source, training_model, start)
    # before the world is left, as the last registered is the first; it keeps no model
    if checkpoints.manager is not None:
        atexit.register(checkpoints.manager.close)
    scheduler = training_model.lr_scheduler
    loader = training_model.loader
    return Initialized(
        training_model, optimizer, scheduler, NoBatches() if loader is None else loader
    )


def _loader(source: BatchSource, model: TrainingModel, start: int) -> Loader:
    checkpoints = model.checkpoints
    return Loader(
        PlannedBatches(source, lambda: checkpoints.plan),
        model.parallel,
        model.training_config.train_steps,
        start,
        lambda: checkpoints.stopped,
        model.gradient_accumulation_steps(),
    )


def _open_text(
    run: RunConfig, model: nn.Module | Mapping[int, nn.Module] | None, ps: ParallelState
) -> Corpus:
    """The text of `run.data`. Raises ValueError: it is not that of the checkpoint that the run goes on from."""
    corpus = open_corpus(run.data, run.training, ps)
    if ps.rank == 0 and (note := note_on_tokenizer(run, corpus)):
        print(f"note: {note}")
    if model is None:
        refuse_another_run(run, corpus.tokenizer.vocab_size, corpus.order, ps)
    return corpus


def _no_loss(output: Any, microbatch: Any) -> Any:
    raise ValueError(
        "initialize was given loss_fn=None, and this step computes a loss; give loss_fn(output, microbatch) -> (sum "
        "of losses, number of tokens), or leave it out where the model gives a loss per label [b, s]"
    )


def _join_world(run: RunConfig, *, joins_world: bool) -> torch.device:
    """This rank's device, once all ranks are there and were given the same configuration."""
    device = join_world(run.device, backend=run.parallel.backend)
    if joins_world and is_initialized():
        atexit.register(destroy_world)
    same_on_all_ranks(run)
    # the loop is the program's: there is no end to undo it at
    if run.training.deterministic:
        use_deterministic()
    return device


def _leave_groups(ps: ParallelState) -> None:
    """No group is held any more, unless the program has ended communication itself."""
    if is_initialized():
        ps.leave()


def _refuse_swapped_arguments(model: Any, batches: Any) -> None:
    """Raise ValueError for a model that is a class, and for batches without the method that is called."""
    if model is not None and not isinstance(model, nn.Module | Mapping):
        if isinstance(model, type):
            kind = f"the class {model.__name__}"
        else:
            kind = repr(model)[:60]
        remedy = "write initialize(MyModel(), config=...)"
        if isinstance(model, (str, Path, RunConfig)):
            remedy = "a configuration is given by name: initialize(config=...)"
        raise ValueError(f"model is {kind}, 1 nn.Module is needed; {remedy}")
    if batches is not None and not _gives_batches(batches):
        raise ValueError(
            f"batches is a {type(batches).__name__} with 0 of the 1 method needed: batch(step, rank=0, size=1) "
            "gives {name: tensor [rows, ...]}, this rank's rows of global batch number `step`"
        )


def _gives_batches(batches: Any) -> bool:
    """Whether `batch` takes a step, a rank and a size: that of Hugging Face's datasets is another one."""
    try:
        taken = signature(batches.batch).parameters.values()
    except (AttributeError, TypeError):
        return False
    except ValueError:  # of one in C nothing is known
        return True
    return any(p.name in ("step", "rank") or p.kind is p.VAR_KEYWORD for p in taken)


def _run_config(config: RunConfig | Mapping[str, Any] | str | Path | None, model: Any) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    if model is None:
        return run_of(config or {})
    if isinstance(config, str | Path):
        return RunConfig.from_toml(config)
    return RunConfig.from_dict(config or {})


def _checked_run(
    run: RunConfig,
    model: nn.Module | Mapping[int, nn.Module] | None,
    world_size: int,
    *,
    reads_text: bool,
) -> RunConfig:
    """The run with its data size. Weights and adapters of a model of the user's are compared with it later.

    Raises ValueError: what does not fit together; a model that is given, and named in the run, too.
    """
    if model is None:
        checked = run.check(world_size, reads_text=reads_text)
        return with_token_files(checked).check(world_size, reads_text=reads_text)
    if run.model.huggingface is not None or run.model.build is not None:
        named = f"model.huggingface={run.model.huggingface}, model.build={run.model.build}"
        raise ValueError(
            f"initialize was given a model, and the run says {named}: 2 models for one run; leave one of them out "
            "(load_huggingface(model, folder) fills a GPTModel of your own)"
        )
    unsaid = replace(run, checkpoint=replace(run.checkpoint, weights=None), lora=LoraConfig())
    without = with_token_files(unsaid.check(world_size)).check(world_size)
    return replace(without, checkpoint=run.checkpoint, lora=run.lora)


def _parallel_state(
    run: RunConfig, model: nn.Module | Mapping[int, nn.Module] | None, device: Any
) -> ParallelState:
    """The layout that the model was built for, or the current one, or a new one.

    Raises ValueError: it is not the one of `run`.
    """
    modules = list(model.values()) if isinstance(model, Mapping) else [model]
    existing = next((module.parallel for module in modules if isinstance(module, GPTModel)), None)
    if existing is None and model_parallel_is_initialized():
        existing = current_state()
    if existing is None:
        return ParallelState.build(run.parallel, device=device)
    if existing.config != run.parallel:
        raise ValueError(
            f"the model is laid out as {existing.config}, the configuration says {run.parallel}; give both the same "
            "sizes (parallel_state.launch() and initialize_model_parallel(...) before the model say them), or "
            "let initialize build the model"
        )
    return existing


def _build_stages(
    run: RunConfig,
    model: nn.Module | Mapping[int, nn.Module] | None,
    corpus: Corpus | None,
    ps: ParallelState,
) -> Mapping[int, nn.Module]:
    if model is None:
        if corpus is not None:
            tokens = corpus.tokenizer.vocab_size
        elif run.model.huggingface is not None or run.model.vocab_size is not None:
            tokens = 1  # there is no tokenizer: the model's own rows are enough for all batches
        else:
            tokens = run.data.vocab_size
        return begin(run, tokens, ps, _say_on_first_rank(ps))
    dtype = None  # as it is
    if run.model.bf16:
        dtype = torch.bfloat16
    elif run.model.fp16:
        dtype = torch.float16
    stages: dict[int, nn.Module] = {}
    modules = model if isinstance(model, Mapping) else {0: model}
    for index, module in modules.items():
        refuse_own_rows(module, "initialize", ps)
        # a GPTModel was built in its dtype, on its device
        if not isinstance(module, GPTModel):
            stages[index] = module.to(ps.device, dtype)
            continue
        if corpus is not None:
            corpus.check_model(
                module.vocab_size, module.max_sequence_length, run.data.sequence_length
            )
        stages[index] = module
    if corpus is not None:
        corpus.check_stages(stages)
    weights = run.checkpoint.weights
    lora = run.lora
    # else frozen weights are read again
    in_checkpoint = lora.rank is None or lora.save_base
    if weights is not None and not (in_checkpoint and from_first(run.checkpoint.resumes, ps)):
        load_weights(stages, weights, ps, _say_on_first_rank(ps), grows=lora.rank is None)
    if lora.rank is not None:
        say = _say_on_first_rank(ps)
        apply_lora(stages, lora, say=lambda line: say(f"note: {line}"))
    return stages


def _say_on_first_rank(ps: ParallelState) -> Callable[[str], None]:
    if ps.rank == 0:
        return print
    return lambda text: None
