"""One greppable line per logged step, the same facts as JSONL, and the model's FLOPs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from core.transformer import TransformerConfig


def flops_per_token(config: TransformerConfig, vocab_size: int, sequence_length: int) -> int:
    """Matmul FLOPs of forward and backward per token; causal attention counts half its square."""
    h, d, a, g = config.hidden_size, config.head_size, config.num_attention_heads, config.groups
    attention = h * d * (2 * a + 2 * g) + sequence_length * a * d
    mlp = h * config.ffn * (3 if config.gated_linear_unit else 2)
    return 6 * (config.num_layers * (attention + mlp) + h * vocab_size)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One logged step: its loss (nats per token) and tokens of all ranks; rates since the last record."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    tflops_per_s: float
    step_ms: float
    tokens: int

    def line(self, total: int) -> str:
        """The greppable line."""
        return (
            f"step {self.step:5d}/{total} | loss {self.loss:.4f} | grad norm {self.grad_norm:.4f} | "
            f"lr {self.learning_rate:.2e} | {self.tokens_per_s:,.0f} tokens/s | {self.tflops_per_s:.4f} TFLOP/s | "
            f"{self.step_ms:.1f} ms/step"
        )


class MetricsLog:
    """Appends records to `metrics.jsonl` in a directory; None writes nothing (ranks other than 0).

    start: steps that a resumed run does not make again; their records stay, later ones are dropped.
    """

    def __init__(self, directory: str | Path | None, start: int = 0) -> None:
        self.records: list[StepRecord] = []
        self._path = Path(directory) / "metrics.jsonl" if directory is not None else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [r for r in read_metrics(self._path) if r.step <= start] if start and self._path.exists() else []
            self._path.write_text("")
            for record in kept:
                self.add(record)

    def add(self, record: StepRecord) -> None:
        """Keep it, and append its line at once, so that a killed run still has it."""
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as f:
                f.write(json.dumps(asdict(record)) + "\n")


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The records of a `metrics.jsonl`, also of a run that was killed while it wrote a line."""
    found = []
    for line in Path(path).read_text().splitlines():
        try:
            found.append(StepRecord(**json.loads(line)))
        except (ValueError, TypeError):  # a line that was never finished
            continue
    return found
