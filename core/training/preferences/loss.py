"""The loss of direct preference optimization, of pairs of rows.

Legend: `p` pairs of a microbatch: row 2 i of `[2 p, s]` is pair i's chosen response, row 2 i + 1 the rejected one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from core.datasets import IGNORED_LABEL
from core.parallel_state import ParallelState
from core.parallel_state.collectives import all_reduce
from core.training.preferences.config import DPOConfig

# what is summed over pairs for `rewards`, with TRL's names; the number of pairs comes last
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


def response_log_probs(losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each row's response, its tokens that count): float64 `[2 p]` each.

    losses: per token, `[2 p, s]`, 0 where labels do not count. Raises ValueError: an odd number of rows.
    """
    if len(losses) % 2 or losses.shape != labels.shape:
        raise ValueError(
            f"losses {list(losses.shape)} of labels {list(labels.shape)}: DPO needs a loss per token of pairs of "
            "rows, chosen and rejected; give rows 2 i and 2 i + 1 to the same microbatch"
        )
    counted = labels != IGNORED_LABEL
    # float64: the loss is of small differences between long sums
    return -(losses.double() * counted).sum(1), counted.sum(1).double()


def pair_losses(ratios: Tensor, tokens: Tensor, config: DPOConfig) -> Tensor:
    """The loss of each pair `[p]`.

    ratios: log-probability of each response less that of the reference, `[2 p]`. tokens: of each response, `[2 p]`.
    sigmoid: equation 7 of arXiv 2305.18290; with label_smoothing the conservative loss (cDPO). ipo: equation 17 of
    arXiv 2310.12036, of means over tokens, as its authors and TRL have it.
    """
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss_type == "ipo":
        means = ratios / tokens.clamp(min=1)
        return (means[0::2] - means[1::2] - 1 / (2 * beta)).square()
    margins = beta * (ratios[0::2] - ratios[1::2])
    return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)


class DPOLoss:
    """The loss as an executor calls it: (sum over pairs, number of pairs); it notes the pairs' rewards beside it.

    A microbatch holds whole pairs, and with them `pair` `[2 p]` (-1 fills up) and `reference` `[2 p]`, the
    log-probabilities under the reference.
    """

    def __init__(self, config: DPOConfig, ps: ParallelState) -> None:
        self._config = config
        self._ps = ps
        self.begin()

    def begin(self) -> None:
        """Forget the pairs so far."""
        self._sums = torch.zeros(len(NAMES) + 1, dtype=torch.float64, device=self._ps.device)

    def __call__(self, output: Tensor, microbatch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(sum of the losses, number of pairs). Raises ValueError: a batch without pairs or their reference."""
        missing = [name for name in ("labels", "pair", "reference") if name not in microbatch]
        if missing:
            raise ValueError(
                f"the batch has {', '.join(microbatch)}, DPO needs {len(missing)} more entries: {', '.join(missing)}"
            )
        log_probs, tokens = response_log_probs(output, microbatch["labels"])
        ratios = log_probs - microbatch["reference"]
        is_pair = (microbatch["pair"][0::2] >= 0).double()
        losses = pair_losses(ratios, tokens, self._config)
        self._note(ratios.detach(), is_pair)
        return (losses * is_pair).sum(), is_pair.sum()

    def _note(self, ratios: Tensor, is_pair: Tensor) -> None:
        chosen, rejected = (self._config.beta * ratios).view(-1, 2).T
        columns = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
        self._sums += torch.stack(
            [*((column * is_pair).sum() for column in columns), is_pair.sum()]
        )

    def rewards(self) -> dict[str, float]:
        """Means over all pairs since `begin`, by TRL's names, on every rank; empty without a pair.

        Collective: all-reduces over pp and dp-cp. Waits for the device.
        """
        # only the last stage has called the loss
        total = all_reduce(self._sums.clone(), self._ps.group("pp"))
        *sums, pairs = all_reduce(total, self._ps.group("dp-cp")).tolist()
        return {name: value / pairs for name, value in zip(NAMES, sums, strict=True) if pairs}

    def tokens(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Labels that count in the global batch of which this rank has `batch`. All-reduce over dp-cp."""
        counted = (batch["labels"] != IGNORED_LABEL).sum()
        return all_reduce(counted, self._ps.group("dp-cp"))
