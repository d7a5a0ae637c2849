"""The plain twin of `core.optimizer.ShardedLamb`: the published update, parameter by parameter, without buckets."""

import torch


class Lamb(torch.optim.Optimizer):
    """You et al. 2019, arXiv 1904.00962, algorithm 2, phi the identity; `adapt` of a group: it has a ratio."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        facts = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, facts)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m, v = (state.setdefault(kind, torch.zeros_like(p)) for kind in ("exp_avg", "exp_avg_sq"))
                state["step"] = t = state.get("step", 0) + 1
                m.copy_(beta1 * m + (1 - beta1) * p.grad)
                v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
                r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
                r = r + group["weight_decay"] * p
                ratio = 1.0
                if group["adapt"] and p.norm() > 0 and r.norm() > 0:
                    ratio = p.norm() / r.norm()
                p -= group["lr"] * ratio * r
