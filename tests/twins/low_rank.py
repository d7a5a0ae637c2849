"""LoRA as the paper writes it: whole matrices W + scale B A of one process, gradients by autograd."""

import torch
from torch.func import functional_call


def adapted_loss(model, factors, scale, tokens, labels):
    """Loss [b, s] of a GPTModel without adapters. factors: weight's name -> (A [r, i], B [o..., r])."""
    weights = dict(model.named_parameters())
    merged = {name: weights[name].detach() + scale * torch.tensordot(b, a, 1) for name, (a, b) in factors.items()}
    return functional_call(model, merged, (tokens,), {"labels": labels})


def reference(model, factors, scale, batch, microbatches):
    """(gradients of the sum of the losses by adapter's name, mean loss) over the batch."""
    leaves = {name: tuple(f.detach().clone().requires_grad_() for f in pair) for name, pair in factors.items()}
    total = 0.0
    for rows in range(microbatches):
        tokens, labels = (batch[key][rows : rows + 1] for key in ("tokens", "labels"))
        total = total + adapted_loss(model, leaves, scale, tokens, labels).sum()
    total.backward()
    gradients = {}
    for name, (a, b) in leaves.items():
        place = name.removesuffix("weight") + "adapter."
        gradients |= {place + "lora_A": a.grad, place + "lora_B": b.grad}
    return gradients, total.item() / (batch["labels"] != -100).sum().item()
