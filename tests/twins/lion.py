"""The plain twin of `core.optimizer.ShardedLion`: the published update, parameter by parameter, without buckets."""

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2. Reads `grad`; a parameter without one is left out."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * p.grad
                p -= lr * (torch.sign(c) + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)
