"""What a run is put together of: the same for the command and for `initialize`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import nn

from core.data_parallel import DataParallel
from core.models.gpt import GPTModel
from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.training.config import RunConfig
from core.training.log.memory import MemoryReport
from core.training.model.begin import began_as
from core.training.preferences.loss import DPOLoss
from core.training.preferences.reference import Preferences, References
from core.training.run.build import build_executor, build_sharded
from core.training.run.checkpoint import Checkpoints
from core.training.run.data import Corpus
from core.training.run.facts import facts_of_run


class RunParts(NamedTuple):
    """Around the stages of a model: who sums gradients, updates weights, drives microbatches and saves; and, with
    `training.objective=dpo`, what it learns from preferences with."""

    shard: DataParallel
    optimizer: ShardedOptimizer
    executor: SingleStage | Pipeline
    checkpoints: Checkpoints
    preferences: Preferences | None


def assemble(
    stages: Mapping[int, nn.Module],
    run: RunConfig,
    corpus: Corpus | None,
    ps: ParallelState,
    say: Callable[[str], None],
    memory: MemoryReport | None = None,
) -> RunParts:
    """Everything that a run needs beside its model and its text; nothing is loaded yet. Collective.

    memory: reports what is held, and follows the first step. Raises ValueError: what `build_sharded`,
    `build_executor` and `Checkpoints` refuse;
    preferences without a text that holds them.
    """
    preferences = None
    if run.training.objective == "dpo":
        if corpus is None:
            raise ValueError(
                "training.objective=dpo reads the pairs of data.train, and this run has 0 texts; leave out "
                "`batches`, or give a GPTModel"
            )
        if note := _note_on_dropout(stages):
            say(f"note: {note}")
        preferences = Preferences(DPOLoss(run.dpo, ps), References(corpus, ps))
    shard, optimizer = build_sharded(stages, run.data_parallel, run.optimizer, ps, memory)
    executor = build_executor(stages, run.pipeline, run.training, ps, shard)
    if memory is not None:
        memory.watch(executor, compiled=run.training.compile != "none")
    # batches of a program's own have no order that a checkpoint could compare
    order = corpus.order if corpus is not None else None
    facts = facts_of_run(stages, corpus, run)
    checkpoints = Checkpoints(
        run.checkpoint,
        optimizer,
        ps,
        run.data,
        run.training,
        say,
        order,
        began_as(run),
        facts,
        preferences.references if preferences is not None else None,
    )
    return RunParts(shard, optimizer, executor, checkpoints, preferences)


def _note_on_dropout(stages: Mapping[int, nn.Module]) -> str:
    """What is said of preferences learned with dropout, which the reference is without; empty: there is none."""
    gpt = next((stage for stage in stages.values() if isinstance(stage, GPTModel)), None)
    if gpt is None:
        return ""
    shares = {
        "model.hidden_dropout": gpt.config.hidden_dropout,
        "model.attention_dropout": gpt.config.attention_dropout,
        "lora.dropout": 0.0 if gpt.lora is None else gpt.lora.dropout,
    }
    drops = [name for name, share in shares.items() if share]
    if not drops:
        return ""
    flags = " ".join(f"--{name.replace('_', '-')} 0" for name in drops)
    return (
        f"{', '.join(f'{name}={shares[name]}' for name in drops)}: rewards compare a model with dropout and a "
        "reference without (TRL's disable_dropout turns it off, and the first loss is log 2, or for ipo "
        f"1 / (2 beta)^2); {flags} does that here"
    )
