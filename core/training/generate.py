"""A text sample: the whole prefix again for every token, which is enough to see what a model has learnt."""

import torch
from torch import Tensor

from core.models.gpt import GPTModel


@torch.no_grad()
def generate(
    model: GPTModel, prompt: list[int], *, new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """`prompt` and `new_tokens` more, the likeliest each (temperature 0) or drawn; stops at the last position.

    Collective over the tensor ranks: every one of them calls it and gets the same tokens.
    Raises ValueError: an empty prompt, or one longer than the model's positions.
    """
    if not 0 < len(prompt) <= model.max_sequence_length:
        raise ValueError(f"the prompt has {len(prompt)} tokens, the model takes 1 to {model.max_sequence_length}")
    device, tp = model.parallel.device, model.place.tp
    generator = torch.Generator().manual_seed(seed)
    tokens, was_training = list(prompt), model.training
    model.eval()
    for _ in range(min(new_tokens, model.max_sequence_length - len(prompt))):
        n = len(tokens)
        width = min(-(-n // tp) * tp, model.max_sequence_length)  # what follows is not attended to
        padded = torch.tensor([tokens + [0] * (width - n)], device=device)
        logits = model.gather_logits(model(padded)) if model.parallel_output else model(padded)
        tokens.append(_pick(logits[0, n - 1], temperature, generator))
    model.train(was_training)
    return tokens


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax().item())
    chances = torch.softmax(logits.double().cpu() / temperature, -1)  # on the CPU: one generator for all devices
    return int(torch.multinomial(chances, 1, generator=generator).item())
