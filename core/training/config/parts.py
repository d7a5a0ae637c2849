"""The settings of a run beside model and data, in small frozen dataclasses; no setting stands in two of them.

Plain values: files and the command line are read into them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from core import dist_checkpointing
from core.optimizer.config import MOST_STEPS
from core.optimizer.state.offload import Offload
from core.parallel_state.config import raise_all
from core.pipeline.schedule import schedules
from core.training.functions import function_of, is_function_name
from core.training.model.config import DTYPES

_MAX_CHUNKS = 1024  # a stage has at least one layer


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How stages take turns where there is more than one pipeline rank.

    Raises ValueError: an unknown schedule, chunks that it does not have.
    """

    schedule: str = "1f1b"
    """A schedule by name (`python -m core.pipeline.simulate --list`); "auto": searched for the measured costs; or a
    function of your own, "package.module:function": (ranks, microbatches) -> Schedule."""

    chunks: int | None = None
    """Stages per rank; default: the schedule's own (2 for "auto")."""

    memory_limit: float | None = None
    """Bytes of activations per rank that "auto" may hold; default: no limit."""

    def __post_init__(self) -> None:
        chunks = self.chunks
        rule = (
            chunks is None or chunks <= _MAX_CHUNKS,
            f"chunks={chunks} stages per rank must be at most {_MAX_CHUNKS}",
        )
        raise_all("PipelineConfig", [rule])
        if not is_function_name(self.schedule):
            self.placement(1)  # raises for an unknown schedule, or chunks that it does not have
        elif chunks is not None:
            raise ValueError(
                f"PipelineConfig: chunks={chunks} is for named schedules; {self.schedule} places its stages itself"
            )

    def generator(self) -> str | schedules.Generator:
        """The schedule as `Pipeline` takes it: a name, or the function. Raises ValueError: no such function."""
        if is_function_name(self.schedule):
            return function_of(self.schedule)
        return self.schedule

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline rank of each stage. Raises ValueError: no such function, what it makes is no schedule."""
        return schedules.placement(self.generator(), ranks, self.chunks)


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """What the data ranks divide among themselves, and where optimizer states live.

    Raises ValueError with every rule that is broken.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    """0: nothing is divided; 1: optimizer states; 2: gradients too, summed in every microbatch; 3: weights too."""

    offload: Literal["none", "optimizer"] = "none"
    """optimizer: float32 copies and moments live in host memory, or in files that are mapped into it."""

    offload_fraction: float = 1.0
    """Share of the elements whose states are offloaded, from 0 (nothing) to 1 (all)."""

    offload_directory: str | None = None
    """Directory of the files that hold offloaded states; default: they lie in host memory."""

    grad_dtype: str | None = None
    """In which gradients are added up; default: float32 for 16-bit weights, else the weights'."""

    reduce_dtype: str | None = None
    """To which gradients are rounded to be sent; default: grad_dtype."""

    bucket_size: int | None = None
    """Elements that are sent together; default: by the device."""

    shard_units: str = "layer"
    """What stage 3 gathers at once: "layer", or a name or pattern of modules."""

    overlap: bool | None = None
    """Send while computing; default: where that pays."""

    check_replicas_every: int = 0
    """Steps between two comparisons of all replicas; 0: never."""

    def __post_init__(self) -> None:
        raise_all("DataParallelConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.zero_stage in (0, 1, 2, 3),
            f"zero_stage={self.zero_stage} is unknown; known: 0, 1, 2, 3",
        )
        yield (
            self.offload in ("none", "optimizer"),
            f"unknown offload {self.offload!r}; known: none, optimizer",
        )
        yield (
            0 <= self.offload_fraction <= 1,
            f"offload_fraction={self.offload_fraction} must be between 0 (nothing) and 1 (all)",
        )
        yield (
            self.offload_directory is None or self.offload != "none",
            f"offload_directory={self.offload_directory} holds nothing with offload=none; use offload=optimizer",
        )
        for name in ("grad_dtype", "reduce_dtype"):
            value = getattr(self, name)
            yield (
                value is None or value in DTYPES,
                f"unknown {name} {value!r}; known: {', '.join(DTYPES)}",
            )
        size = self.bucket_size
        yield size is None or size >= 1, f"bucket_size={size} must be at least 1 element"
        every = self.check_replicas_every
        yield every >= 0, f"check_replicas_every={every} must be at least 0 (never)"

    def arguments(self) -> dict[str, Any]:
        """The keywords of `DataParallel(module, ps, ...)`."""
        return {
            "zero_stage": self.zero_stage,
            "bucket_size": self.bucket_size,
            "grad_dtype": DTYPES[self.grad_dtype] if self.grad_dtype is not None else None,
            "reduce_dtype": DTYPES[self.reduce_dtype] if self.reduce_dtype is not None else None,
            "shard_units": self.shard_units,
            "overlap": self.overlap,
            "check_replicas_every": self.check_replicas_every,
        }

    def offload_policy(self) -> Offload | None:
        """Where the optimizer's states live: the `offload` of `build_optimizer(shard, config, offload=...)`."""
        if self.offload == "none":
            return None
        kind = "cpu" if self.offload_directory is None else "disk"
        return Offload(kind=kind, fraction=self.offload_fraction, directory=self.offload_directory)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, in which batches, and what is logged. Raises ValueError with every rule that is broken."""

    train_steps: int = 200
    """Updates of the whole run, those before a resume included."""

    global_batch_size: int = 16
    """Rows of one update over all ranks: micro_batch_size x accumulation x data ranks."""

    micro_batch_size: int = 2
    """Rows that one rank computes at once."""

    rampup_batch_size: tuple[str, ...] = ()
    """Three numbers, start increment samples: the global batch grows from `start` rows to global_batch_size by
    `increment` at a time, in equal shares of the first `samples` rows; empty: it is of one size."""

    recompute: Literal["none", "selective", "layer", "stage"] = "none"
    """Activations that are computed again in backward instead of being kept (activation checkpointing)."""

    recompute_keeps: Literal["attention", "nothing"] = "attention"
    """What is kept all the same: attention's output, which costs one activation per layer and saves its kernel a
    second run; selective recomputation keeps nothing."""

    offload_activations: float = 0.0
    """Share of each stage's layers, the first ones, whose activations wait in host memory from forward to backward: 0
    none, 1 all. On a CPU it is a copy, and saves nothing."""

    loss_chunk: int | None = None
    """Tokens whose logits exist at once in the loss, for large vocabularies and long sequences: less memory for a
    product more; default: all of a microbatch."""

    compile: Literal["none", "layer"] = "none"
    """Layers as code that torch compiles in the first steps (inductor; one graph for all layers of a kind)."""

    compile_fallback: bool = False
    """A foreign layer that does not become one graph may become several, with eager code between; else an error."""

    log_interval: int = 10
    """Steps between two records of loss, gradient norm and rates."""

    eval_interval: int = 0
    """Steps between two validations; 0: only at the end."""

    eval_batches: int = 0
    """Global batches of one validation; 0: all of the validation text."""

    seed: int = 1234
    """Seed of dropout."""

    output: str = "runs/pretrain"
    """Directory of metrics, report and the resolved configuration."""

    compare_first_step: bool | None = None
    """Repeat the first step in one process on the CPU after the run, and tell how far it is off; default: of small
    models that train on CPUs."""

    compare_with: str | None = None
    """Another run's metrics.jsonl: report how far this run's losses are from its."""

    tensorboard: bool = False
    """Write the records for TensorBoard too, into `output`."""

    wandb_project: str | None = None
    """Write the records to this project of Weights & Biases too; offline unless WANDB_MODE says otherwise."""

    deterministic: bool = False
    """The same bits from run to run on an accelerator, too: torch's deterministic algorithms, slower."""

    profile: str | None = None
    """Steps in torch's profiler, as 20:25 for steps 20 to 24 (from 0): a trace of every rank under output/profile."""

    profile_nvtx: bool = False
    """Give the profile's ranges to a profiler around the process (nsys; CUDA only) instead of writing traces."""

    peak_tflops: float | None = None
    """Peak of one device in TFLOP/s, for the utilisation (MFU) in the log; default: known by name, or measured."""

    def __post_init__(self) -> None:
        raise_all("TrainingConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name in ("train_steps", "global_batch_size", "micro_batch_size", "log_interval"):
            yield getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1"
        yield from self._ramp_rules()
        yield (
            self.train_steps <= MOST_STEPS,
            f"train_steps={self.train_steps} must be at most 2**62",
        )
        for name in ("eval_interval", "eval_batches"):
            yield getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative"
        # activation checkpointing
        known = ("none", "selective", "layer", "stage")
        megatron = "; what Megatron calls full is layer here" if self.recompute == "full" else ""
        yield (
            self.recompute in known,
            f"unknown recompute {self.recompute!r}; known: {', '.join(known)}{megatron}",
        )
        chunk, keeps = self.loss_chunk, self.recompute_keeps
        yield (
            chunk is None or chunk >= 1,
            f"loss_chunk={chunk} must be at least 1 token; leave it out for all",
        )
        yield (
            keeps in ("attention", "nothing"),
            f"unknown recompute_keeps {keeps!r}; known: attention, nothing",
        )
        share = self.offload_activations
        yield (
            0 <= share <= 1,
            f"offload_activations={share} must be between 0 (no layer) and 1 (all of them)",
        )
        yield (
            not share or self.compile == "none",
            f"offload_activations={share} moves what single operations save, compile={self.compile} makes 1 of a "
            "layer's; use one of the two",
        )
        yield (
            not share or self.recompute != "stage",
            f"offload_activations={share} moves what layers save in forward, which is nothing with recompute=stage; "
            "use recompute=layer, selective or none",
        )
        yield (
            self.compile in ("none", "layer"),
            f"unknown compile {self.compile!r}; known: none, layer",
        )
        yield from self._profile_rules()
        peak = self.peak_tflops
        yield (
            peak is None or peak > 0,
            f"peak_tflops={peak} must be above 0; leave it out to have it found",
        )

    def _profile_rules(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.profile is not None or not self.profile_nvtx,
            "profile_nvtx needs profile=start:stop; give both",
        )
        if self.profile is None:
            return
        steps = self.profiled_steps
        if steps is None:
            yield (
                False,
                f"profile={self.profile!r} must be start:stop, such as 20:25 for the steps 20 to 24 (from 0)",
            )
            return
        yield (
            steps[1] <= self.train_steps,
            f"profile={self.profile} ends after the run's train_steps={self.train_steps}; use steps from 0 to "
            f"{self.train_steps}",
        )

    def _ramp_rules(self) -> Iterator[tuple[bool, str]]:
        words = self.rampup_batch_size
        if not words:
            return
        given = f"rampup_batch_size={' '.join(words)}"
        if len(words) != 3 or not all(word.isdecimal() for word in words):
            yield (
                False,
                f"{given} must be 3 whole numbers, start increment samples, as 16 16 100000",
            )
            return
        start, increment, _ = map(int, words)
        whole = self.global_batch_size
        yield (
            0 < start <= whole and increment > 0 and (whole - start) % increment == 0,
            f"{given} does not lead to global_batch_size={whole} in steps of {increment}; use a start that lies a "
            "multiple of the increment below it",
        )

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first step of the profile, from 0, and the one after its last; None: no profile."""
        first, _, stop = (self.profile or "").partition(":")
        if not (first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
            return None
        return int(first), int(stop)

    @property
    def ramp(self) -> tuple[int, int, int] | None:
        """(rows at first, rows that are added each time, rows over which it grows); None: no growth."""
        if not self.rampup_batch_size:
            return None
        start, increment, rows = map(int, self.rampup_batch_size)
        return start, increment, rows


CHANGES = ("data", "batch", "optimizer", "model")  # of a run that continues
METRICS = ("validation.bits_per_byte", "loss")  # stored with the checkpoints of a run


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run's state is saved, how much of it is kept, and what a run starts from.

    Raises ValueError with every rule that is broken.
    """

    directory: str | None = None
    """Where all checkpoints of the run lie, as step-00001000; default: nothing is saved, also not on SIGTERM."""

    every: int = 0
    """Steps between two checkpoints; 0: at the end only."""

    keep_last: int = 3
    """How many of the newest checkpoints are kept."""

    keep_every: int = 0
    """Checkpoints of steps that are multiples of this are kept for ever; 0: none."""

    keep_hours: float | None = None
    """One checkpoint per so many hours is kept for ever."""

    keep_best: str | None = None
    """A metric, by which the best checkpoints are kept: validation.bits_per_byte, where validation and a save fall
    on one step, or loss."""

    keep_best_count: int = 1
    """How many of them."""

    keep_best_mode: Literal["min", "max"] = "min"
    """Whether small or large values are good."""

    stale_seconds: float = 60.0
    """How long a job may be silent before another one takes over its directory, or waits no more for its writers."""

    on_failure: Literal["retry", "raise", "warn"] = "retry"
    """After a save that failed: "retry" warns and saves the next due step, "raise" ends the run at once, "warn" never
    does. A second failure in a row ends a run that retries."""

    export_huggingface: str | None = None
    """Folder that is made at the end of the run: the model and its tokenizer, as transformers loads them."""

    resume: Literal["must", "auto", "never"] = "auto"
    """From the newest checkpoint that verifies: "auto" if there is one, "must" (or it is an error), or "never"."""

    load: str | None = None
    """One checkpoint to start from, of any layout, wherever it lies; goes before `resume`."""

    weights: str | None = None
    """One checkpoint whose weights, and nothing else, a run begins with at step 0, whatever its data, batch, sequence
    length or optimizer were; a run that goes on from its own `directory` reads them no more."""

    change: tuple[str, ...] = ()
    """What a checkpoint that continues may have had otherwise: data (its text, order, sequence length), batch (its
    size), optimizer (its kind; the states begin anew)."""

    share_reads: bool | None = None
    """What several ranks load is read from storage by one of them and sent to the others; false: each reads for
    itself; None: shared where ranks are on several hosts, or the store is an object store."""

    asynchronous: bool = True
    """Save beside the next steps instead of waiting."""

    def __post_init__(self) -> None:
        raise_all("CheckpointConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name, minimum in (("every", 0), ("keep_last", 1), ("keep_every", 0)):
            yield (
                getattr(self, name) >= minimum,
                f"{name}={getattr(self, name)} must be at least {minimum}",
            )
        # what is kept, and by which metric
        hours, mode, failure = self.keep_hours, self.keep_best_mode, self.on_failure
        yield hours is None or hours > 0, f"keep_hours={hours} must be above 0"
        yield self.stale_seconds > 0, f"stale_seconds={self.stale_seconds} must be above 0"
        yield (
            self.keep_best_count >= 1,
            f"keep_best_count={self.keep_best_count} must be at least 1",
        )
        yield mode in ("min", "max"), f"unknown keep_best_mode {mode!r}; known: min, max"
        yield (
            self.keep_best in (None, *METRICS),
            f"keep_best={self.keep_best!r} is no metric of a run; known: {', '.join(METRICS)}",
        )
        yield (
            failure in ("retry", "raise", "warn"),
            f"unknown on_failure {failure!r}; known: retry, raise, warn",
        )
        yield (
            self.load is None or self.weights is None,
            f"load={self.load} goes on with a run and weights={self.weights} begins one; give one of them",
        )
        for name in self.change:
            yield name in CHANGES, f"change names {name!r}; known: {', '.join(CHANGES)}"
        yield (
            self.resume in ("must", "auto", "never"),
            f"unknown resume {self.resume!r}; known: must, auto, never",
        )
        yield (
            self.directory is not None or (self.every == 0 and self.resume != "must"),
            f"every={self.every} and resume={self.resume} need a directory; give one",
        )

    def resumes(self) -> bool:
        """Whether a run of these settings goes on from a checkpoint instead of beginning; asks the directory."""
        if self.load is not None:
            return True
        if self.directory is None or self.resume == "never":
            return False
        return bool(dist_checkpointing.CheckpointRoot(self.directory).steps())
