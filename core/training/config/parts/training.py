"""How long a run trains, in which batches, and what it logs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from core.field_names import tells_names
from core.optimizer.config import MOST_STEPS
from core.parallel_state.config import raise_all
from core.training.config.messages.huggingface import HUGGINGFACE


@tells_names("training", HUGGINGFACE)
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, in which batches, and what is logged. Raises ValueError with every rule that is broken."""

    objective: Literal["next_token", "dpo"] = "next_token"
    """next_token: every label alike; dpo: preferences, pairs of a chosen and a rejected response to one prompt. A row
    of the batch sizes is then a pair, two rows of sequence_length tokens."""

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
            self.objective in ("next_token", "dpo"),
            f"unknown objective {self.objective!r}; known: next_token, dpo",
        )
        yield (
            self.train_steps <= MOST_STEPS,
            f"train_steps={self.train_steps} must be at most 2**62",
        )
        for name in ("eval_interval", "eval_batches"):
            yield getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative"
        # activation checkpointing
        known = ("none", "selective", "layer", "stage")
        megatron = ""
        if self.recompute == "full":
            megatron = "; what Megatron calls full is layer here"
        yield (
            self.recompute in known,
            f"unknown recompute {self.recompute!r}; known: {', '.join(known)}{megatron}",
        )
        chunk = self.loss_chunk
        keeps = self.recompute_keeps
        yield (
            chunk is None or chunk >= 1,
            f"loss_chunk={chunk} must be at least 1 token; leave it out for all",
        )
        yield (
            keeps in ("attention", "nothing"),
            f"unknown recompute_keeps {keeps!r}; known: attention, nothing",
        )
        yield (
            self.compile in ("none", "layer"),
            f"unknown compile {self.compile!r}; known: none, layer",
        )
        yield from self._offload_rules()
        yield from self._profile_rules()
        peak = self.peak_tflops
        yield (
            peak is None or peak > 0,
            f"peak_tflops={peak} must be above 0; leave it out to have it found",
        )

    def _offload_rules(self) -> Iterator[tuple[bool, str]]:
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
        numbers = self.rampup_batch_size
        if not numbers:
            return
        setting = f"rampup_batch_size={' '.join(numbers)}"
        if len(numbers) != 3 or not all(word.isdecimal() for word in numbers):
            yield (
                False,
                f"{setting} must be 3 whole numbers, start increment samples, as 16 16 100000",
            )
            return
        start, increment, _ = map(int, numbers)
        whole = self.global_batch_size
        yield (
            0 < start <= whole and increment > 0 and (whole - start) % increment == 0,
            f"{setting} does not lead to global_batch_size={whole} in steps of {increment}; use a start that lies a "
            "multiple of the increment below it",
        )

    @property
    def rows_per_sample(self) -> int:
        """Rows of `data.sequence_length` tokens that one row of the batch sizes is: a pair has two."""
        return 2 if self.objective == "dpo" else 1

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
