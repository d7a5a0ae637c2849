"""A text sample: the full prefix runs again for every token (no key-value cache), to see what a model learnt."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from core.models.gpt import GPTModel
from core.pipeline.run.step import evaluating


class ForwardExecutor(Protocol):
    """What generation needs of an executor whose model is spread over pipeline stages."""

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        """Logits on the rank of the last stage, None elsewhere."""
        ...

    def from_last_stage(self, value: Tensor) -> Tensor:
        """`value` of the rank of the last stage, on all of them."""
        ...


def generate(
    model: GPTModel,
    prompt: list[int],
    *,
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    executor: ForwardExecutor | None = None,
) -> list[int]:
    """`prompt` and `new_tokens` more, the likeliest each (temperature 0) or drawn; stops at the last position.

    model: the whole model; or any stage of it, with the `Pipeline` of all stages as `executor`.
    Collective over the tensor and pipeline ranks: every one of them calls it and gets the same tokens. Under
    sequence parallelism the positions that can be used are a multiple of the tensor ranks.
    Raises ValueError: an empty prompt, or one longer than the model's positions.
    """
    device = model.parallel.device
    # sequence parallelism splits the positions over the tensor ranks: their number must divide
    multiple = model.place.tp if model.place.splits_sequence else 1
    max_length = model.max_sequence_length // multiple * multiple
    if not 0 < len(prompt) <= max_length:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the model takes 1 to {max_length}; shorten it")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0 (0 takes the likeliest token)")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for length in range(len(prompt), min(len(prompt) + new_tokens, max_length)):
        padding = [0] * (-length % multiple)  # on the right: causal attention does not see it
        logits = _forward_logits(model, executor, torch.tensor([tokens + padding], device=device))
        next_token = torch.zeros(1, dtype=torch.int64, device=device)
        if logits is not None:
            full_logits = model.gather_logits(logits) if model.parallel_output else logits
            next_token.fill_(_choose_token(full_logits[0, length - 1], temperature, generator))
        if executor is not None:
            next_token = executor.from_last_stage(next_token)
        tokens.append(int(next_token.item()))
    return tokens


def _forward_logits(model: GPTModel, executor: ForwardExecutor | None, tokens: Tensor) -> Tensor | None:
    """[b, s, v_padded/tp], None on ranks without the last stage."""
    # the model warns of logits that are split over tensor ranks; the caller gathers these
    warns_of_columns, model.tells_of_columns = model.tells_of_columns, False
    try:
        if executor is not None:
            logits: Tensor | None = executor.forward({"tokens": tokens})
        else:
            with evaluating(model):
                logits = model(tokens)
    finally:
        model.tells_of_columns = warns_of_columns
    return logits


def _choose_token(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax().item())
    probabilities = torch.softmax(logits.double().cpu() / temperature, -1)
    # drawn on the CPU: one generator gives the same tokens on every kind of device
    return int(torch.multinomial(probabilities, 1, generator=generator).item())
