"""What a run reports before and after: who holds what, the loss against simple baselines, the last step drawn."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from core.datasets import ConversationBatches, PreferenceBatches, TokenSource
from core.datasets.tokenizers.folder import dtype_of_weights, model_type, padding_token
from core.parallel_state import ParallelState
from core.parallel_state.environment import note_on_bf16
from core.pipeline import Pipeline, SingleStage, Timeline
from core.pipeline.draw.draw import draw_text
from core.training.config import Loaded, RunConfig
from core.training.doctor.environment import environment
from core.training.log.console import terminal_width
from core.training.log.earlier import make_room
from core.training.log.facts import run_facts
from core.training.log.metrics import MetricsLog, device_name
from core.training.log.page import Sample, write_page
from core.training.log.picture import headline, write_report
from core.training.log.sinks import open_sinks
from core.training.model.config import ModelConfig
from core.training.run.build import count_parameters, count_trained
from core.training.run.checkpoint import Checkpoints
from core.training.run.cut_answers import cut_answers
from core.training.run.data import Corpus, note_on_tokenizer
from core.transformer.precision import in_8_bits

_WIDEST = 118  # columns of a drawing
_NOT_KEPT = "the weights of this run are not kept; --checkpoint.directory DIR saves them"
# tokens of each text in which padding is looked for
_LOOKED_AT = 1 << 18
# families whose embedding has no padding_idx in transformers
_TRAIN_PADDING = ("gpt2",)


def last_step(executor: SingleStage | Pipeline) -> dict[str, Timeline]:
    """title -> timeline of a pipeline's last step, and of what the simulator predicts for its times. Collective."""
    if isinstance(executor, SingleStage):
        return {}
    # played with the measured times: the difference is what the schedule does not know (messages, jitter)
    measured = executor.timeline()
    return {
        "predicted for these times": executor.predicted(measured).timeline,
        "last step, measured": measured,
    }


def configuration(loaded: Loaded, say: Callable[[str], None]) -> None:
    """Say every setting that differs from its default; `open_log` writes all of them to `run.toml` of the output."""
    lines = loaded.lines()
    path = Path(loaded.run.training.output) / "run.toml"
    say(f"{len(lines)} settings differ from their defaults (all are in {path}):")
    for line in lines:
        say(f"  {line}")
    for line in loaded.unused():
        say(f"note: {line}")
    if _keeps_nothing(loaded.run):
        say(f"note: {_NOT_KEPT}")
    if rate := note_on_rate(loaded):
        say(f"note: {rate}")


def note_on_rate(loaded: Loaded) -> str:
    """What is said of trained weights that begin at the rate of new ones, which nobody chose; empty: they do not."""
    run = loaded.run
    begins = run.model.huggingface or run.checkpoint.weights
    is_chosen = loaded.origin["optimizer.lr"] != "default" or run.optimizer.optimizer != "adamw"
    if not begins or is_chosen or run.checkpoint.resumes():
        return ""
    usual = "5e-5"
    if run.training.objective == "dpo":
        usual = "1e-6"
    if run.lora.rank is not None:
        usual = "1e-5" if run.training.objective == "dpo" else "2e-4"
    return (
        f"optimizer.lr={run.optimizer.lr:g} is the default, of weights that begin at random; for trained ones "
        f"{'and adapters ' * (run.lora.rank is not None)}{usual} is usual: --optimizer.lr {usual}"
    )


def _keeps_nothing(run: RunConfig) -> bool:
    checkpoint = run.checkpoint
    return checkpoint.directory is None and checkpoint.export_huggingface is None


def open_log(
    loaded: Loaded, start: int, checkpoints: Checkpoints, say: Callable[[str], None]
) -> MetricsLog:
    """Where records go: metrics.jsonl, and TensorBoard or W&B if the run has them; written by rank 0. And run.toml.

    start: steps that a resumed run does not make again. Files of another run are moved aside before.
    Raises ImportError, on every rank: a missing extra.
    """
    run = loaded.run
    output = Path(run.training.output)
    rank = checkpoints.ps.rank
    # not earlier: a run that is refused, or waits for a directory in use, moves and replaces nothing
    if rank == 0:
        make_room(output, checkpoints.name, start, say)
        loaded.to_toml(output / "run.toml")
    sinks = open_sinks(
        output,
        tensorboard=run.training.tensorboard,
        wandb_project=run.training.wandb_project,
        config=run.resolved(),
        start=start,
        rank=rank,
    )
    directory = output if rank == 0 else None
    return MetricsLog(directory, start, sinks, checkpoints.name.name)


def layout_in_words(ps: ParallelState, run: RunConfig) -> str:
    """`4 processes on CPU: 2-way tensor parallel, 2-stage pipeline (1f1b)`."""
    world = ps.config.world_size
    sizes = ps.sizes
    parts = []
    device = "CPU" if ps.device.type == "cpu" else device_name(ps.device)
    if sizes["tp"] > 1:
        parts.append(
            f"{sizes['tp']}-way tensor parallel{' (the sequence too)' * ps.config.sequence_parallel}"
        )
    if sizes["cp"] > 1:
        parts.append(f"{sizes['cp']}-way context parallel")
    if (stages := ps.size("pp")) > 1:
        parts.append(f"{stages}-stage pipeline ({run.pipeline.schedule})")
    if (replicas := ps.size("dp")) > 1:
        parts.append(f"{replicas} replicas (ZeRO stage {run.data_parallel.zero_stage})")
    processes = "1 process" if world == 1 else f"{world} processes"
    return f"{processes} on {device}" + (f": {', '.join(parts)}" if parts else "")


def _in_8_bits(model: ModelConfig) -> str:
    config = model.transformer()
    count = sum(in_8_bits(config, layer) for layer in range(config.num_layers))
    return (
        f"8 bits: products of the linears of {count} of {config.num_layers} layers ({config.fp8}, "
        f"{config.fp8_recipe}); mfu is a share of the peak of {str(model.dtype).removeprefix('torch.')}"
    )


def _has_inside(source: TokenSource, token: int) -> bool:
    """Whether a token is in the first of a text where later ones see it: of conversations, not as their last."""
    if not source.marks_answers:
        return bool((source.tokens(0, min(source.num_tokens, _LOOKED_AT)) == token).any())
    for number in range(source.num_documents):
        start, stop = source.document_start(number), source.document_start(number + 1)
        if start > _LOOKED_AT:
            break
        if bool((source.tokens(start, stop - 1) == token).any()):
            return True
    return False


def note_on_padding(folder: str, corpus: Corpus) -> str:
    """What is said of a padding token that occurs in the text; empty: there is none, or it does not."""
    folder_path = Path(folder).expanduser()
    token = padding_token(folder_path)
    if token is None or model_type(folder_path) in _TRAIN_PADDING:
        return ""
    if not any(_has_inside(source, token) for _, source in corpus.train_parts):
        return ""
    place = "which ends documents here" if token == corpus.closes else "which occurs in the text"
    return (
        f"{folder}/config.json says pad_token_id={token}, {place}: transformers leaves the gradient of that row of "
        "the input embedding out, here it is trained"
    )


def note_on_length(run: RunConfig) -> str:
    """What is said of sequences longer than those of the folder's model; empty: they are not."""
    length, positions = run.data.sequence_length, run.model.folder_positions
    if positions is None or length <= positions:
        return ""
    return (
        f"data.sequence_length={length} is more than the {positions} positions (max_position_embeddings) of "
        f"{run.model.huggingface}; the model learns the longer ones here, and an export says {length}"
    )


def note_on_dtype(run: RunConfig) -> str:
    """What is said of a folder's 16-bit weights that are trained in float32; empty: they are not."""
    folder = run.model.huggingface
    stored = dtype_of_weights(Path(folder).expanduser()) if folder is not None else None
    if stored not in ("bfloat16", "float16") or run.model.dtype != torch.float32:
        return ""
    return (
        f"{folder}/config.json says dtype={stored}: these weights are trained, saved and exported in float32 here "
        "(transformers 5 keeps their dtype); --model.bf16 computes in bfloat16 over float32 main weights"
    )


def note_on_validation(run: RunConfig, corpus: Corpus) -> str:
    """What is said of validation that was asked for and has no text; empty: it has, or nobody asked."""
    interval = run.training.eval_interval
    if not interval or corpus.validation_texts:
        return ""
    return (
        f"training.eval_interval={interval} validates nothing: 0 tokens are there to validate on; give data.valid, "
        "or a share of the text by data.split"
    )


def describe(
    stages: Mapping[int, nn.Module],
    ps: ParallelState,
    corpus: Corpus,
    run: RunConfig,
    say: Callable[[str], None],
) -> int:
    """Who holds what, before a run; the parameters of the model. All-gather over pp."""
    say(layout_in_words(ps, run))
    if run.model.dtype == torch.bfloat16 and ps.rank == 0 and (note := note_on_bf16(ps.device)):
        say(f"note: {note}; model.bf16=false trains faster")
    if run.model.fp8 is not None and run.model.build is None:
        say(_in_8_bits(run.model))
    if run.model.huggingface is not None:
        folder_notes = (
            note_on_padding(run.model.huggingface, corpus),
            note_on_length(run),
            note_on_dtype(run),
        )
        for note in folder_notes:
            if note:
                say(f"note: {note}")
    if ps.rank == 0 and (note := note_on_tokenizer(run, corpus)):
        say(f"note: {note}")
    total, local = count_parameters(stages, ps)
    say(f"parameters: {total:,} in all, {local:,} on rank 0 (with padding)")
    if run.lora.rank is not None:
        trained = count_trained(stages, ps)
        say(
            f"adapters of rank {run.lora.rank}: {trained:,} parameters are trained ({trained / total:.2%}), all "
            "others are frozen"
        )
    train_tokens, valid_tokens = corpus.num_tokens
    say(f"text: {train_tokens:,} tokens to train on, {valid_tokens:,} to validate")
    if note := note_on_validation(run, corpus):
        say(f"note: {note}")
    if isinstance(pairs := corpus.train, PreferenceBatches):
        longer = ""
        if pairs.truncated:
            longer = f", {pairs.truncated:,} responses are longer and lose their end"
        smoothing = f", label smoothing {run.dpo.label_smoothing}" * bool(run.dpo.label_smoothing)
        say(
            f"preferences: {pairs.num_samples:,} pairs of two rows of {pairs.sequence_length:,} tokens{longer}; the "
            f"loss is DPO's ({run.dpo.loss_type}), beta {run.dpo.beta}{smoothing}"
        )
    if isinstance(train := corpus.train, ConversationBatches):
        longer = ""
        if train.truncated:
            longer = f", {train.truncated:,} are longer and lose their end"
        if train.unanswered:
            longer += (
                f", {len(train.unanswered):,} of them all of their answers: they are passed over"
            )
        say(
            f"conversations: {train.token_file.num_documents:,} in {train.num_samples:,} rows of "
            f"{train.sequence_length:,} tokens{longer}; the loss is of their answers"
        )
    for name, lost in cut_answers(corpus, run):
        say(f"note: {name}: {lost.note}")
    return total


@contextmanager
def _kept(path: Path, written: list[Path], say: Callable[[str], None]) -> Iterator[None]:
    """Around what writes a file about a run that is over: a full disk is said, and the rest goes on."""
    try:
        yield
        written.append(path)
    except OSError as error:
        say(f"note: {path} is not written: {error}")


def _tell_bits(log: MetricsLog, baselines: Mapping[str, float], say: Callable[[str], None]) -> None:
    """Bits per byte of the baselines and of each validation set's last pass."""
    # later ones replace earlier ones
    last = {
        record.name: record.bits_per_byte
        for record in log.validations
        if record.bits_per_byte is not None
    }
    if baselines or last:
        say(
            "bits per byte: "
            + ", ".join(f"{name} {value:.3f}" for name, value in ({**baselines, **last}).items())
        )


def tell(
    loaded: Loaded,
    log: MetricsLog,
    corpus: Corpus,
    timelines: Mapping[str, Timeline],
    sample: Sample,
    ps: ParallelState,
    parameters: int,
    say: Callable[[str], None],
) -> None:
    """After a run: `report.html` and `report.png`, the last step drawn, a sample, bits per byte of the validation
    texts beside the baselines."""
    output = Path(loaded.run.training.output)
    records = log.records
    # what needs no model: how far the run got is seen against these
    baselines = dict(corpus.baselines)
    facts = run_facts(records, layout_in_words(ps, loaded.run), parameters)
    # a model of one's own gave the prompt back
    shown = None if loaded.run.model.build is not None and not sample.written else sample
    written = [output / name for name in ("run.toml", "metrics.jsonl")]
    with _kept(output / "report.png", written, say):
        write_report(
            output / "report.png",
            records,
            corpus.bytes_per_token,
            baselines=baselines,
            timelines=timelines,
            validations=log.validations,
        )
    with _kept(output / "report.html", written, say):
        write_page(
            output / "report.html",
            records,
            run=loaded.run.resolved(),
            origin=loaded.origin,
            environment=environment(ps.device),
            validations=log.validations,
            baselines=baselines,
            timelines=timelines,
            sample=shown,
            bytes_per_token=corpus.bytes_per_token,
            title=str(output),
            facts=facts,
        )
    for title, timeline in timelines.items():
        say(f"{headline(title, timeline)}\n{draw_text(timeline, terminal_width(_WIDEST))}\n")
    if shown is None:
        say(
            f"note: no sample: the model of model.build={loaded.run.model.build} is one's own, and only a GPTModel "
            "is asked to go on with a text here"
        )
    else:
        say(
            f"--- a sample: the text begins ---\n{sample.prompt}\n--- and the model goes on ---\n"
            f"{sample.written}\n---"
        )
    _tell_bits(log, baselines, say)
    say("written: " + ", ".join(map(str, written)))
    if _keeps_nothing(loaded.run):
        say(f"note: {_NOT_KEPT}")
