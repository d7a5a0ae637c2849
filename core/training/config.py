"""What a run is told, in small frozen parts none of which holds another's fact. Plain values: a command line can
be generated from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from core.models.gpt import gpt2_spec, llama_spec
from core.optimizer import Offload
from core.parallel_state.config import raise_all
from core.pipeline import schedules
from core.transformer import TransformerConfig, TransformerLayerSpec

STYLES: dict[str, dict[str, Any]] = {
    "llama": {
        "normalization": "RMSNorm",
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
    },
    "gpt2": {"activation_func": "gelu_tanh"},
}

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by its style and sizes; `transformer()` spells it out. Weights are float32, or of 16 bits.

    Raises ValueError: an unknown style, two dtypes at once.
    """

    style: Literal["llama", "gpt2"] = "llama"
    num_layers: int = 4
    hidden_size: int = 192
    num_attention_heads: int = 8
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = 512
    dropout: float = 0.0
    tie_embeddings: bool = True
    bf16: bool = False
    fp16: bool = False  # with a loss scale that follows overflows
    seed: int = 1234

    def __post_init__(self) -> None:
        known = ", ".join(STYLES)
        rules = [
            (self.style in STYLES, f"unknown style {self.style!r}; known: {known}"),
            (not (self.bf16 and self.fp16), "bf16 and fp16 are 2 dtypes for one model; give one of them"),
        ]
        raise_all("ModelConfig", rules)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    def transformer(self) -> TransformerConfig:
        """The facts of the model. Raises ValueError with all that is wrong."""
        return TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            ffn_hidden_size=self.ffn_hidden_size,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            params_dtype=self.dtype,
            **STYLES[self.style],
        )

    def spec(self) -> TransformerLayerSpec:
        """The parts of its layers."""
        return llama_spec() if self.style == "llama" else gpt2_spec()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens, in which pieces. `train` and `valid` are prefixes of .bin/.idx files; None prepares the default
    corpus, the standard library's sources, in `directory`. Raises ValueError with every rule that is broken."""

    directory: str = "runs/corpus"
    train: str | None = None
    valid: str | None = None
    tokenizer: str | None = None
    vocab_size: int = 4096
    sequence_length: int = 128
    seed: int = 1234

    def __post_init__(self) -> None:
        raise_all("DataConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        given = [name for name in ("train", "valid", "tokenizer") if getattr(self, name) is not None]
        yield (
            len(given) in (0, 3),
            f"{len(given)} of train, valid and tokenizer given ({', '.join(given)}); give all 3, or none of them for "
            "the default corpus",
        )
        yield self.sequence_length >= 1, f"sequence_length={self.sequence_length} must be at least 1"
        yield self.vocab_size >= 257, f"vocab_size={self.vocab_size} cannot hold every byte; use 257 or more"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How stages take turns where there is more than one pipeline rank. Raises ValueError: an unknown schedule.

    schedule: a name (`python -m core.pipeline.simulate --list`) or "auto". chunks: stages per rank; default: the
    schedule's own (two for "auto"). memory_limit: of "auto", bytes of activations per rank.
    """

    schedule: str = "1f1b"
    chunks: int | None = None
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        self.placement(1)

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return schedules.placement(self.schedule, ranks, self.chunks)


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """What the data ranks divide among themselves, and where optimizer states live.

    zero_stage: 0 nothing is divided; 1 optimizer states; 2 gradients too, summed in every microbatch; 3 weights too.
    offload: "optimizer": float32 copies and moments of `offload_fraction` of the elements live in host memory, or in
        files of `offload_directory` that are mapped into it.
    grad_dtype: in which gradients are added up; default: float32 for 16-bit weights, else the weights'.
        reduce_dtype: to which they are rounded to be sent; default: grad_dtype.
    bucket_size: elements that are sent together; default: by the device. shard_units: what stage 3 gathers at once:
        "layer", or a name or pattern of modules.
    overlap: send while computing; default: where that pays (see `DataParallel`). check_replicas_every: steps between
        two comparisons of all replicas; 0: never.
    Raises ValueError with every rule that is broken.
    """

    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Literal["none", "optimizer"] = "none"
    offload_fraction: float = 1.0
    offload_directory: str | None = None
    grad_dtype: str | None = None
    reduce_dtype: str | None = None
    bucket_size: int | None = None
    shard_units: str = "layer"
    overlap: bool | None = None
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        raise_all("DataParallelConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.zero_stage in (0, 1, 2, 3), f"zero_stage={self.zero_stage} is unknown; known: 0, 1, 2, 3"
        yield self.offload in ("none", "optimizer"), f"unknown offload {self.offload!r}; known: none, optimizer"
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
            yield value is None or value in DTYPES, f"unknown {name} {value!r}; known: {', '.join(DTYPES)}"
        size = self.bucket_size
        yield size is None or size >= 1, f"bucket_size={size} must be at least 1 element"
        every = self.check_replicas_every
        yield every >= 0, f"check_replicas_every={every} must be at least 0 (never)"

    def arguments(self) -> dict[str, Any]:
        """What `DataParallel(module, ps, ...)` is told."""
        return {
            "zero_stage": self.zero_stage,
            "bucket_size": self.bucket_size,
            "grad_dtype": DTYPES[self.grad_dtype] if self.grad_dtype is not None else None,
            "reduce_dtype": DTYPES[self.reduce_dtype] if self.reduce_dtype is not None else None,
            "shard_units": self.shard_units,
            "overlap": self.overlap,
            "check_replicas_every": self.check_replicas_every,
        }

    def placement(self) -> Offload | None:
        """Where the optimizer's states live: what `build_optimizer(shard, config, offload=...)` is told."""
        if self.offload == "none":
            return None
        kind = "cpu" if self.offload_directory is None else "disk"
        return Offload(kind=kind, fraction=self.offload_fraction, directory=self.offload_directory)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, in which batches, and what is told on the way. Raises ValueError with every rule that is broken."""

    train_steps: int = 300
    global_batch_size: int = 16
    micro_batch_size: int = 8
    recompute: Literal["none", "selective", "layer", "stage"] = (
        "none"  # activations to compute again instead of keeping
    )
    log_interval: int = 10
    eval_interval: int = 0  # 0: only at the end
    seed: int = 1234
    output: str = "runs/pretrain"
    compare_with: str | None = None  # another run's metrics.jsonl: tell how far this run's losses are from its

    def __post_init__(self) -> None:
        raise_all("TrainingConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name in ("train_steps", "global_batch_size", "micro_batch_size", "log_interval"):
            yield getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1"
        yield self.eval_interval >= 0, f"eval_interval={self.eval_interval} must not be negative"
        known = ("none", "selective", "layer", "stage")
        yield self.recompute in known, f"unknown recompute {self.recompute!r}; known: {', '.join(known)}"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run's state is saved, how much of it is kept, and what a run starts from.

    directory: of all its checkpoints, `step-00001000` and so on; None saves nothing, also not on SIGTERM.
    every: steps between two; 0 saves at the end only. keep_last: of the newest; keep_every: multiples of it are kept
    for ever. resume: from the newest that verifies: "auto" if there is one, "must", or "never".
    load: one checkpoint to start from, of any layout, wherever it lies; goes before `resume`.
    Raises ValueError with every rule that is broken.
    """

    directory: str | None = None
    every: int = 0
    keep_last: int = 3
    keep_every: int = 0
    resume: Literal["must", "auto", "never"] = "auto"
    load: str | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        raise_all("CheckpointConfig", self._rules())

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for name, least in (("every", 0), ("keep_last", 1), ("keep_every", 0)):
            yield getattr(self, name) >= least, f"{name}={getattr(self, name)} must be at least {least}"
        yield self.resume in ("must", "auto", "never"), f"unknown resume {self.resume!r}; known: must, auto, never"
        yield (
            self.directory is not None or (self.every == 0 and self.resume != "must"),
            f"every={self.every} and resume={self.resume} need a directory; give one",
        )
