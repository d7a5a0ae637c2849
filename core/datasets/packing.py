"""What a batch tells about the documents in its rows, with Megatron's options and meaning.

Legend: `b` rows, `s` tokens in a row. A document ends with its end-of-text token, which still belongs to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.parallel_state.documents import mark_documents

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
        options = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        requested = [name for name in options if getattr(self, name)]
        if requested and self.end_of_text is None:
            raise ValueError(
                f"{', '.join(requested)} need end_of_text, got None; give the tokenizer's, and prepare the text with "
                "--append-eod"
            )

    def batch(
        self, tokens: Tensor, labels: Tensor, begin: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`tokens` and `labels` int64 `[b, s]`, with what the options ask for; `labels` are changed in place.

        begin: where the document of each token begins in its row, `[b, s]`, where the tokens do not tell it.

        position_ids: int64 `[b, s]`. document_begin: int64 `[b, s]`, the position in its row where the document of
        each token begins; nothing of size s x s.
        """
        batch = {"tokens": tokens, "labels": labels}
        # Megatron's meaning: what follows the end of a document is not to be predicted from it
        if self.eod_mask_loss:
            labels[tokens == self.end_of_text] = IGNORED_LABEL
        if self.reset_position_ids or self.reset_attention_mask:
            positions = torch.arange(tokens.shape[1])
            if begin is None:
                begin = _document_begin(tokens, self.end_of_text, positions)
            if self.reset_position_ids:
                batch["position_ids"] = positions - begin
            if self.reset_attention_mask:
                batch["document_begin"] = begin
                mark_documents(batch)
        return batch


def _document_begin(tokens: Tensor, end_of_text: int | None, positions: Tensor) -> Tensor:
    """Where the document of each token begins in its row: `[b, s]`."""
    # no token is -1
    closing = -1 if end_of_text is None else end_of_text
    begins = torch.zeros_like(tokens)
    # the position behind each end of text; the running maximum carries it to the tokens that follow
    begins[:, 1:] = positions[1:] * tokens[:, :-1].eq(closing)
    return begins.cummax(dim=1).values
