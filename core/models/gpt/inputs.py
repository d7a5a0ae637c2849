"""What a model is called with. Values are looked at where that waits for nothing, else asserted on the device."""

import warnings

import torch
from torch import Tensor


def _in_range(name: str, values: Tensor, size: int, *, ignored: int | None = None) -> None:
    """Every value in [0, size), or equal to `ignored`: tables and losses would take some others silently."""
    if values.numel() == 0 or values.is_meta or torch.compiler.is_exporting():
        return
    if values.device.type != "cpu":
        fits = (values >= 0) & (values < size)
        if ignored is not None:
            fits |= values == ignored
        torch._assert_async(fits.all(), f"{name} out of range")
        return
    low, high = torch.aminmax(values)
    if low >= 0 and high < size:
        return
    wrong = values[(values < 0) | (values >= size)]
    wrong = wrong[wrong != ignored] if ignored is not None else wrong
    if wrong.numel():
        also = "" if ignored is None else f", or {ignored} to leave a token out"
        raise ValueError(f"{name} holds {int(wrong[0])}, valid are 0 to {size - 1}{also}")


def either(name: str, value: Tensor | None, other: str, also: Tensor | None) -> Tensor:
    """The one of two names for an argument that was given. Raises TypeError: none of them, or both."""
    found = value if also is None else also
    if found is None or (value is not None and also is not None):
        raise TypeError(f"give {name} or {other}, not {'both' if found is not None else 'neither'}")
    return found


def check_values(position_ids: Tensor | None, positions: int, labels: Tensor | None, vocab_size: int) -> None:
    """Raise ValueError for a position or label out of range."""
    if position_ids is not None:
        _in_range("position_ids", position_ids, positions)
    if labels is not None:
        _in_range("labels", labels, vocab_size, ignored=-100)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless `tokens` are integers [b, s] of the vocabulary."""
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens must be int64 or int32, got {tokens.dtype} {tuple(tokens.shape)}")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [b, s], got {tuple(tokens.shape)}; one sequence is tokens[None]")
    _in_range("tokens", tokens, vocab_size)


def check_optional(
    b: int, s: int, position_ids: Tensor | None, attention_mask: Tensor | None, labels: Tensor | None
) -> None:
    """Raise ValueError for what does not fit tokens [b, s]; positions and mask may be the same for all rows."""
    if position_ids is not None:
        shape = tuple(position_ids.shape)
        if position_ids.dtype != torch.int64 or shape not in ((b, s), (1, s)):
            raise ValueError(f"position_ids must be int64 [b, s] = {(b, s)}, got {position_ids.dtype} {shape}")
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if attention_mask.dtype != torch.bool or shape not in ((b, 1, s, s), (1, 1, s, s)):
            raise ValueError(
                f"attention_mask must be bool [{b}, 1, {s}, {s}] with True = masked out, got {attention_mask.dtype} "
                f"{shape}; None is causal"
            )
    if labels is not None and (labels.dtype != torch.int64 or tuple(labels.shape) != (b, s)):
        raise ValueError(f"labels must be int64 [b, s] = {(b, s)}, got {labels.dtype} {tuple(labels.shape)}")


class FirstInputs:
    """Looks at the values of the first labels and of the first mask: habits from elsewhere that raise no error."""

    def __init__(self) -> None:
        self._labels = self._mask = False  # seen

    @property
    def done(self) -> bool:
        """Whether there is nothing left to look at."""
        return self._labels and self._mask

    @torch.compiler.disable
    def look(self, tokens: Tensor | None, attention_mask: Tensor | None, labels: Tensor | None) -> None:
        """Warns: labels that are the tokens, a mask that lets tokens see later ones."""
        if labels is not None and tokens is not None and not self._labels:
            self._labels = True
            if torch.equal(labels, tokens.to(labels.dtype)):
                warnings.warn(
                    "labels equal tokens: labels are the next tokens here, already shifted, as Megatron has them "
                    "(Hugging Face shifts inside). A model of these learns to copy: give tokens[:, :-1] and "
                    "labels=tokens[:, 1:]",
                    stacklevel=4,
                )
        if attention_mask is not None and not self._mask:
            self._mask = True
            if not attention_mask.triu(1).eq(torch.ones_like(attention_mask).triu(1)).all():
                warnings.warn(
                    "attention_mask lets tokens see later ones: a mask of your own takes the place of the causal one "
                    "(True = masked out); combine them with | torch.ones(s, s, dtype=torch.bool).triu(1) unless this "
                    "is meant",
                    stacklevel=4,
                )
