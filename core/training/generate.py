"""A text sample: the whole prefix again for every token, which is enough to see what a model has learnt."""

import torch
from torch import Tensor

from core.models.gpt import GPTModel
from core.pipeline.step import evaluating


def generate(
    model: GPTModel, prompt: list[int], *, new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """`prompt` and `new_tokens` more, the likeliest each (temperature 0) or drawn; stops at the last position.

    Collective over the tensor ranks: every one of them calls it and gets the same tokens. Under sequence
    parallelism the positions that can be used are a multiple of the tensor ranks.
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
    with evaluating(model):
        for n in range(len(prompt), min(len(prompt) + new_tokens, longest)):
            padded = torch.tensor([tokens + [0] * (-n % multiple)], device=device)  # padding is not attended to
            logits = model.gather_logits(model(padded)) if model.parallel_output else model(padded)
            tokens.append(_pick(logits[0, n - 1], temperature, generator))
    return tokens


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax().item())
    chances = torch.softmax(logits.double().cpu() / temperature, -1)  # on the CPU: one generator for all devices
    return int(torch.multinomial(chances, 1, generator=generator).item())
