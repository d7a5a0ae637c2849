"""How the next token is chosen from logits: the likeliest, or drawn from the likely ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.parallel_state.config import raise_all


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature: 0 takes the likeliest token, else logits are divided by it. top_k: only the k likeliest are drawn.
    top_p: only the likeliest that together have at least this probability are (nucleus sampling, arXiv 1904.09751).

    vocab_size: of the tokenizer, where the model's table has more rows (padding): these are no tokens.

    Raises ValueError with every rule that does not hold.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        rules = [
            (
                self.temperature >= 0,
                f"temperature={self.temperature} must be at least 0 (0 takes the likeliest token)",
            ),
            (self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} must be at least 1"),
            (self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p} must lie in (0, 1]"),
        ]
        raise_all("generate", rules)

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token by its logits [v]. ValueError: they are not finite numbers."""
        logits = logits[: self.vocab_size]
        # of NaN the first, where there is one
        likeliest = logits.argmax()
        if bool(logits[likeliest].isnan()):
            raise ValueError("the model's logits are NaN: its weights are, or were never filled")
        if self.temperature == 0:
            return int(likeliest.item())
        # drawn on the CPU: one generator gives the same tokens on every kind of device
        scaled = logits.double().cpu() / self.temperature
        if self.top_k is not None and self.top_k < len(scaled):
            # of equal ones the first: exactly k
            best = scaled.topk(self.top_k)
            scaled = torch.full_like(scaled, -torch.inf).scatter(0, best.indices, best.values)
        probabilities = torch.softmax(scaled, -1)
        if self.top_p is not None:
            probabilities = self._nucleus(probabilities, self.top_p)
        return int(torch.multinomial(probabilities, 1, generator=generator).item())

    @staticmethod
    def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
        """Zero outside of the smallest set of tokens that together have `top_p`; the likeliest is in it."""
        ordered, tokens = probabilities.sort(descending=True)
        # what comes before a token: the likeliest has 0 before it, and always stays
        before = ordered.cumsum(0) - ordered
        nucleus = torch.zeros_like(probabilities)
        nucleus[tokens] = torch.where(before < top_p, ordered, 0.0)
        return nucleus
