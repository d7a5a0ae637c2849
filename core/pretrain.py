"""Pretrain a GPT on text, over tensor, pipeline and data parallel ranks, on CPUs or accelerators.

    python -m core.pretrain --help              # one process
    torchrun --standalone --nproc-per-node 4 -m core.pretrain --parallel.tensor 2 --parallel.pipeline 2
    torchrun --standalone --nproc-per-node 8 -m core.pretrain --config run.toml --optimizer.lr 3e-4

Without data of your own it reads the interpreter's standard library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from core import parallel_state
from core.optimizer import ShardedOptimizer
from core.parallel_state import ParallelState
from core.parallel_state.environment import started_processes
from core.pipeline import Pipeline, SingleStage
from core.training import Loaded, RunConfig, load_run, same_on_all_ranks, train
from core.training.config.sources import checked
from core.training.log.console import Console, errors_as_one_line
from core.training.log.experts import loads_of
from core.training.log.memory import MemoryReport
from core.training.log.metrics import total_peak_flops
from core.training.log.page import Sample
from core.training.log.profile import StepProfiler
from core.training.model.begin import begin, sample, step_flops_per_token
from core.training.preferences.reference import first_batches
from core.training.resume.batch_plan import PlannedBatches, cut_as_planned
from core.training.resume.same_run import refuse_another_run
from core.training.run.assembly import assemble
from core.training.run.checkpoint import Checkpoints
from core.training.run.compare import comparisons
from core.training.run.data import BatchSource, open_corpus
from core.training.run.evaluate import validate
from core.training.run.loader import local_batches
from core.training.run.summary import configuration, describe, last_step, open_log, tell
from core.transformer.attention.kernels import kernels_of_run

# status of a run that was asked to stop before its end (EX_TEMPFAIL)
TRY_AGAIN = 75


def pretrain(loaded: Loaded, run: RunConfig, ps: ParallelState) -> None:
    """Train, validate, sample, report, and check the first step against one process."""
    s = run.data.sequence_length
    tokens_per_step = run.training.global_batch_size * run.training.rows_per_sample * s
    console = Console(ps.rank, run.training.train_steps, tokens_per_step=tokens_per_step)
    configuration(loaded, console.say)
    corpus = open_corpus(run.data, run.training, ps)
    refuse_another_run(run, corpus.tokenizer.vocab_size, corpus.order, ps)
    stages = begin(run, corpus.tokenizer.vocab_size, ps, console.say, may_be_on_meta=True)
    corpus.check_stages(stages)
    parameters = describe(stages, ps, corpus, run, console.say)
    memory = MemoryReport(stages, ps, say=console.say)
    assembled = assemble(stages, run, corpus, ps, console.say, memory)
    _, optimizer, executor, checkpoints, preferences = assembled
    start = console.start = checkpoints.resume()
    if start >= run.training.train_steps:
        console.say(
            f"nothing to do: {start} of {run.training.train_steps} steps are made; ask for more train_steps"
        )
        checkpoints.export()
        return

    source = first_batches(corpus, preferences, executor, start, console.say)
    validation = None
    if corpus.validation_texts:
        validation = partial(validate, executor, corpus, ps, optimizer, preferences)
    profiler = StepProfiler(run.training, ps, console.say)
    with console, checkpoints, open_log(loaded, start, checkpoints, console.say) as log, profiler:
        first = train(
            executor,
            optimizer,
            _batch_of_step(source, checkpoints, executor, run, ps),
            run.training,
            flops_per_token=step_flops_per_token(run, stages, corpus.tokenizer.vocab_size, ps),
            peak_flops=total_peak_flops(ps, run.model.dtype, run.training.peak_tflops),
            log=log,
            say=console.say,
            every_step=console.every_step if console.bar else None,
            validate=validation,
            checkpoints=checkpoints,
            start=start,
            tokens_per_step=console.tokens if checkpoints.plan.is_even(start) else 0,
            profiler=profiler,
            experts=loads_of(stages.values(), ps),
            dpo=preferences.loss if preferences is not None else None,
        )
    _tell_skipped(optimizer, run, console.say)
    if checkpoints.stopped:
        raise SystemExit(TRY_AGAIN)

    # collective, so before rank 0 writes its report alone
    steps = last_step(executor)
    prompt = corpus.prompt(s // 2 or 1)
    written = sample(stages, prompt, executor, corpus.tokenizer.vocab_size)
    if ps.rank == 0:
        text = Sample.of(corpus.tokenizer, prompt, written)
        tell(loaded, log, corpus, steps, text, ps, parameters, console.say)
        records = log.records
        for line in comparisons(first, start, records, run, corpus, parameters, ps.device, source):
            console.say(line)


def _tell_skipped(optimizer: ShardedOptimizer, run: RunConfig, say: Callable[[str], None]) -> None:
    """How many steps changed nothing, and why."""
    if skipped := optimizer.skipped_steps:
        reason = "their gradients were not finite"
        if run.optimizer.skip_grad_norm_above:
            reason += ", or their norm was a spike"
        say(f"{skipped} of {optimizer.step_count} steps were skipped: {reason}")


def _batch_of_step(
    source: BatchSource,
    checkpoints: Checkpoints,
    executor: SingleStage | Pipeline,
    run: RunConfig,
    ps: ParallelState,
) -> Callable[[int], Mapping[str, Tensor]]:
    """step -> this rank's rows; the executor is laid out for their number, where the batch grows."""
    batches = PlannedBatches(source, lambda: checkpoints.plan)
    to_device = local_batches(ps)
    rank = ps.index("dp")
    replicas = ps.size("dp")

    def batch_of(step: int) -> Mapping[str, Tensor]:
        cut_as_planned(executor, checkpoints.plan, step, run.training, replicas)
        return to_device(batches.batch(step, rank, replicas))

    return batch_of


def main(args: Sequence[str] | None = None, *, description: str = "") -> None:
    """The run that a command line describes, on this process or on torchrun's ranks.

    args: default: those of this process. Raises SystemExit: --help, mistakes, and a run that was asked to stop (75).
    """
    loaded = load_run(args, description=description)
    with errors_as_one_line():
        run = checked(loaded, started_processes())
        # run.toml names what text became
        loaded = replace(loaded, run=replace(loaded.run, data=run.data))
        with (
            parallel_state.launch(run.device, backend=run.parallel.backend) as device,
            errors_as_one_line(),
        ):
            same_on_all_ranks(run)
            ps = ParallelState.build(run.parallel, device=device)
            with kernels_of_run(device, deterministic=run.training.deterministic):
                pretrain(loaded, run, ps)
            # threads of gloo that live into the interpreter's end have ended a rank by SIGABRT
            ps.leave()


if __name__ == "__main__":
    main(description=__doc__)
