"""What a batch tells about the documents in its rows, with Megatron's options and meaning.

Legend: `b` rows, `s` tokens in a row. A document ends with its end-of-text token, which still belongs to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100  # torch's own default `ignore_index`


@dataclass(frozen=True, kw_only=True)
class Packing:
    """end_of_text: the token that closes a document. reset_position_ids: positions count from 0 in each document.
    reset_attention_mask: attention stays inside a document. eod_mask_loss: no loss where the input is the token
    that closes a document (what follows it is not to be guessed from another document)."""

    end_of_text: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        asked = [
            name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, name)
        ]
        if asked and self.end_of_text is None:
            raise ValueError(
                f"{', '.join(asked)} need end_of_text, got None; give the tokenizer's, and prepare the text with "
                "--append-eod"
            )

    def batch(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`tokens` and `labels` int64 `[b, s]`, with what was asked for; `labels` are changed in place.

        position_ids: int64 `[b, s]`. attention_mask: bool `[b, 1, s, s]`, True = masked out, causal included.
        """
        found = {"tokens": tokens, "labels": labels}
        if self.eod_mask_loss:
            labels[tokens == self.end_of_text] = IGNORED_LABEL
        if self.reset_position_ids or self.reset_attention_mask:
            here = torch.arange(tokens.shape[1])
            begin = _document_begin(tokens, self.end_of_text, here)
            if self.reset_position_ids:
                found["position_ids"] = here - begin
            if self.reset_attention_mask:
                key, query = here, here[:, None]
                found["attention_mask"] = (key > query) | (key < begin[:, None, :, None])
        return found


def _document_begin(tokens: Tensor, end_of_text: int | None, here: Tensor) -> Tensor:
    """Where the document of each token begins in its row: `[b, s]`."""
    begins = torch.zeros_like(tokens)
    begins[:, 1:] = here[1:] * tokens[:, :-1].eq(-1 if end_of_text is None else end_of_text)
    return begins.cummax(dim=1).values
