"""A text sample: the whole prefix again for every token, which is enough to see what a model has learnt."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from core.models.gpt import GPTModel
from core.pipeline.run.step import evaluating


class Forward(Protocol):
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
    executor: Forward | None = None,
) -> list[int]:
    """`prompt` and `new_tokens` more, the likeliest each (temperature 0) or drawn; stops at the last position.

    model: the whole model; or any stage of it, with the `Pipeline` of all stages as `executor`.
    Collective over the tensor and pipeline ranks: every one of them calls it and gets the same tokens. Under
    sequence parallelism the positions that can be used are a multiple of the tensor ranks.
    Raises ValueError: an empty prompt, or one longer than the model's positions.
    """
    device, multiple = model.parallel.device, model.place.tp if model.place.splits_sequence else 1
    longest = model.max_sequence_length // multiple * multiple
    if not 0 < len(prompt) <= longest:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the model takes 1 to {longest}; shorten it")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be at least 0 (0 takes the likeliest token)")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for n in range(len(prompt), min(len(prompt) + new_tokens, longest)):
        padded = torch.tensor([tokens + [0] * (-n % multiple)], device=device)  # padding is not attended to
        logits = _logits(model, executor, padded)
        found = torch.zeros(1, dtype=torch.int64, device=device)
        if logits is not None:
            whole = model.gather_logits(logits) if model.parallel_output else logits
            found.fill_(_pick(whole[0, n - 1], temperature, generator))
        tokens.append(int((found if executor is None else executor.from_last_stage(found)).item()))
    return tokens


def _logits(model: GPTModel, executor: Forward | None, tokens: Tensor) -> Tensor | None:
    """[b, s, v_padded/tp], where the last stage is; they are gathered by the caller, so there is nothing to tell."""
    tells, model.tells_of_columns = model.tells_of_columns, False
    try:
        if executor is not None:
            found: Tensor | None = executor.forward({"tokens": tokens})
        else:
            with evaluating(model):
                found = model(tokens)
    finally:
        model.tells_of_columns = tells
    return found


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax().item())
    chances = torch.softmax(logits.double().cpu() / temperature, -1)  # on the CPU: one generator for all devices
    return int(torch.multinomial(chances, 1, generator=generator).item())
