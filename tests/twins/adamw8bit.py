"""The plain twin of `core.optimizer.ShardedAdamW8bit`: whole tensors, the nearest of all 256 values, no buckets."""

import torch

BLOCK = 64


def values(signed):
    """Dettmers et al., arXiv 2110.02861: bitsandbytes' `create_dynamic_map`."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        found += means.tolist() + (-means).tolist() * signed
    return torch.tensor(sorted(found), dtype=torch.float64)


def rounded(x, signed):
    """x as its codes and scales give it back."""
    if x.dim() < 2 or x.numel() < 4096:
        return x
    table, flat = values(signed).to(x.dtype), x.flatten()
    size = flat.numel() // BLOCK * BLOCK
    out = flat.clone()
    for start in range(0, size, BLOCK):
        block = flat[start : start + BLOCK]
        scale = block[block.abs().argmax()]
        if scale:
            codes = (block / scale).unsqueeze(1).sub(table).abs().argmin(1)
            if not signed:
                codes = torch.where(block > 0, codes.clamp(min=1), codes)
            block = table[codes] * scale
        out[start : start + BLOCK] = block
    return out.view(x.shape)


class AdamW8bit(torch.optim.Optimizer):
    """torch.optim.AdamW whose moments are rounded after each step."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                m, v = (state.get(kind, torch.zeros_like(p)) for kind in ("exp_avg", "exp_avg_sq"))
                state["step"] = t = state.get("step", 0) + 1
                m = beta1 * m + (1 - beta1) * p.grad
                v = beta2 * v + (1 - beta2) * p.grad**2
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p -= group["lr"] * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
                state["exp_avg"], state["exp_avg_sq"] = rounded(m, True), rounded(v, False)
