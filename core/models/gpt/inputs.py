"""Checks what a model is called with: on the CPU values are compared, on an accelerator asserted without waiting."""

import hashlib
import warnings
from typing import NoReturn

import torch
from torch import Tensor

from core.parallel_state import ContextRows, ParallelState
from core.parallel_state.collectives import Group, all_gather, all_gather_objects
from core.parallel_state.value_range import check_range

# bytes of a message that context ranks tell each other
_TOLD = 512
# labels by which it can be said that none is shifted
_FEWEST = 4


def one_of_two(name: str, value: Tensor | None, other: str, second_value: Tensor | None) -> Tensor:
    """The value that was given under one of two names of an argument. Raises TypeError: neither, or both."""
    value_given = value if second_value is None else second_value
    if value_given is None or (value is not None and second_value is not None):
        raise TypeError(
            f"give {name} or {other}, not {'both' if value_given is not None else 'neither'}"
        )
    return value_given


def check_values(
    position_ids: Tensor | None, positions: int, labels: Tensor | None, vocab_size: int
) -> None:
    """Raise ValueError for a position or label out of range."""
    if position_ids is not None:
        check_range("position_ids", position_ids, positions)
    if labels is not None:
        check_range("labels", labels, vocab_size, ignored=-100)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless `tokens` are integers [b, s] of the vocabulary."""
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"tokens must be a tensor [b, s], got a {type(tokens).__name__}; give torch.as_tensor(tokens)"
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        got = f"{tokens.dtype} {tuple(tokens.shape)}"
        if tokens.is_floating_point() and tokens.dim() == 3:
            raise ValueError(
                f"tokens must be int64 or int32, got {got}: another stage's output, and this stage embeds tokens; "
                "make it with pre_process=False (the first stage alone has True, the last alone post_process=True), "
                "or let gpt_stages make each rank's"
            )
        raise ValueError(f"tokens must be int64 or int32, got {got}; give tokens.long()")
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens must be [b, s], got {tuple(tokens.shape)}; one sequence is tokens[None]"
        )
    check_range("tokens", tokens, vocab_size)


def _are_unshifted(tokens: Tensor, labels: Tensor) -> bool:
    """Whether all labels that count are the tokens of their own places, and not the next ones as well."""
    counts = labels != -100
    # a text that repeats one token has both; of fewer labels nothing can be said
    following = counts[:, :-1] & (labels[:, :-1] != tokens[:, 1:])
    is_own = labels == tokens
    return bool((is_own | ~counts).all() & (counts.sum() >= _FEWEST) & following.any())


def check_optional(
    b: int,
    s: int,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
) -> None:
    """Raise ValueError for what does not fit tokens [b, s]; positions and mask may be the same for all rows."""
    if position_ids is not None:
        shape = tuple(position_ids.shape)
        if position_ids.dtype != torch.int64 or shape not in ((b, s), (1, s)):
            raise ValueError(
                f"position_ids must be int64 [b, s] = {(b, s)}, got {position_ids.dtype} {shape}"
            )
    if attention_mask is not None:
        shape = tuple(attention_mask.shape)
        if attention_mask.dtype != torch.bool or shape not in ((b, 1, s, s), (1, 1, s, s)):
            raise ValueError(
                f"attention_mask must be bool [{b}, 1, {s}, {s}] with True = masked out, got {attention_mask.dtype} "
                f"{shape}; None is causal{_of_padding(attention_mask, b, s)}"
            )
    if labels is not None and (labels.dtype != torch.int64 or tuple(labels.shape) != (b, s)):
        is_other_integer = labels.dtype != torch.int64 and not labels.is_floating_point()
        remedy = "; give labels.long()" if is_other_integer else ""
        raise ValueError(
            f"labels must be int64 [b, s] = {(b, s)}, got {labels.dtype} {tuple(labels.shape)}{remedy}"
        )


def _of_padding(mask: Tensor, b: int, s: int) -> str:
    """What is said of a mask [b, s] as Hugging Face gives it, 1 where a token is; empty: it is another."""
    if tuple(mask.shape) != (b, s):
        return ""
    if mask.bool()[:, 0].all():
        return ". Padding on the right needs none: leave attention_mask out, and have -100 in labels where it is 0"
    return (
        ". Pad on the right, which needs no mask (-100 in labels); for padding on the left give "
        "~attention_mask.bool()[:, None, None, :] | torch.ones(s, s, dtype=torch.bool).triu(1), and position_ids of "
        "(attention_mask.cumsum(1) - 1).clamp(min=0)"
    )


def check_context(
    s: int, ranks: int, position_ids: Tensor | None, attention_mask: Tensor | None
) -> None:
    """Raise ValueError for rows [b, s] of one of `ranks` context ranks that do not say which rows they are."""
    # s is this rank's share, of an early and a late chunk
    if s % 2:
        raise ValueError(
            f"{s} rows on each of {ranks} context ranks: a sequence is cut into {2 * ranks} chunks, of which each "
            f"rank holds 2; use sequences of a multiple of {2 * ranks} tokens"
        )
    # without them each rank would embed positions 0, 1, ... of its own rows, and no error be raised
    if position_ids is None:
        raise ValueError(
            f"a batch without position_ids over context={ranks} ranks: its {s} rows are not rows 0 to {s - 1}; "
            "context_batch(batch, ps) cuts a batch of whole sequences and fills them in"
        )
    if attention_mask is not None:
        raise ValueError(
            f"a bool attention_mask of size s x s over context={ranks} ranks, which hold s/{ranks} rows each; give "
            "document_begin [b, s], or use context=1"
        )


def check_documents(
    document_begin: Tensor, shape: tuple[int, ...], ps: ParallelState, attention_mask: Tensor | None
) -> None:
    """Raise ValueError unless document_begin fits tokens [b, s/cp] of these rows: ascending, none after its token.

    On CPUs every context rank raises what is wrong on any: one that left alone would be waited for in the first
    layer. All-gather of 512 bytes over cp.
    """
    problem = _problem_of_documents(document_begin, shape, ContextRows.of_state(ps), attention_mask)
    # an accelerator asserts asynchronously instead: nobody waits there
    group = ps.group("cp") if ps.device.type == "cpu" else None
    if group is not None:
        text = (problem or "").encode()[:_TOLD]
        texts_as_bytes = all_gather(
            torch.frombuffer(bytearray(text.ljust(_TOLD, b"\0")), dtype=torch.uint8)[None], group
        )
        if texts_as_bytes.any():
            texts = [bytes(row.tolist()).rstrip(b"\0").decode() for row in texts_as_bytes]
        else:
            texts = []
        problem = "; ".join(
            f"rank {rank}: {text}" for rank, text in zip(group.ranks, texts, strict=False) if text
        )
    if problem:
        raise ValueError(problem)


def _problem_of_documents(
    document_begin: Tensor, shape: tuple[int, ...], rows: ContextRows, attention_mask: Tensor | None
) -> str | None:
    if attention_mask is not None:
        return "attention_mask and document_begin are given, 2 masks; give one of them"
    if document_begin.dtype != torch.int64 or tuple(document_begin.shape) != shape:
        found = f"{document_begin.dtype} {tuple(document_begin.shape)}"
        return f"document_begin must be int64 [b, s] = {shape}, got {found}"
    numbers = rows.rows(shape[1] * rows.size).to(document_begin.device)
    wrong = (document_begin > numbers) | (document_begin < 0)
    # attention leaves whole ranges of keys out, which needs begins that ascend
    wrong[:, 1:] |= document_begin[:, 1:] < document_begin[:, :-1]
    if document_begin.device.type != "cpu":
        torch._assert_async(~wrong.any(), "document_begin after its token, or decreasing")
    elif wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        return (
            f"document_begin[{row}, {column}] is {int(document_begin[row, column])} for row {int(numbers[column])} "
            "of its sequence; a document begins at its token or before, at 0 at least, and begins never decrease"
        )
    return None


def _are_consecutive(positions: Tensor) -> bool:
    """Whether positions [b, s] rise by one from each to the next."""
    return positions.shape[1] > 1 and bool((positions.diff(dim=1) == 1).all())


class FirstInputs:
    """Checks the first labels and the first mask: mistakes from other libraries' conventions that raise no error."""

    def __init__(self) -> None:
        self._labels_seen = self._mask_seen = self._context_seen = self._told_of_documents = False

    @property
    def done(self) -> bool:
        """Whether both were checked."""
        return self._labels_seen and self._mask_seen

    @torch.compiler.disable
    def check_context(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        packed: bool,
        group: Group,
        context: ContextRows,
    ) -> None:
        """The first rows of the ranks of one sequence: raises ValueError on all of them where they are the same rows,
        or where only some have documents (`packed`). Warns of positions that are not those of these rows.
        All-gather of objects over cp, once.
        """
        if self._context_seen:
            return
        self._context_seen = True
        # a hash, so that the message stays small whatever the batch
        rows = torch.cat((tokens.flatten(), position_ids.flatten())).cpu().numpy().tobytes()
        positions = position_ids.cpu()
        held = context.rows(context.size * positions.shape[1])[None].cpu()
        facts = (
            hashlib.sha256(rows).hexdigest(),
            packed,
            hashlib.sha256(positions.numpy().tobytes()).hexdigest(),
            _are_consecutive(positions) and not _are_consecutive(held),
        )
        of_ranks = all_gather_objects(facts, group)
        with_documents = [
            rank for rank, (_, has, *_) in zip(group.ranks, of_ranks, strict=True) if has
        ]
        if 0 < len(with_documents) < group.size:
            raise ValueError(
                f"{len(with_documents)} of {group.size} context ranks ({with_documents}) were given document_begin, "
                "the others none; context_batch(batch, ps) cuts it for all of them"
            )
        if len({rows for rows, *_ in of_ranks}) == 1:
            raise ValueError(
                f"{group.size} context ranks were given the same {tokens.shape[1]} rows, which are not parts of one "
                "sequence; context_batch(batch, ps) cuts each rank's rows out of a batch of whole sequences"
            )

        # positions begin anew with each document, and of one constant nothing can be said
        if packed or bool((positions == positions[0, 0]).all()):
            return
        of_blocks = [rank for rank, (*_, wrong) in zip(group.ranks, of_ranks, strict=True) if wrong]
        if len({same for *_, same, _ in of_ranks}) == 1:
            found = f"the same on all {group.size} context ranks"
        elif of_blocks:
            found = f"consecutive rows on rank {of_blocks[0]}"
        else:
            return
        warnings.warn(
            f"position_ids are {found}. Attention takes the rows of {group.size} context ranks for those that "
            "context_batch(batch, ps) cuts out of whole sequences, an early and a late chunk of each for every "
            "rank: let it cut tokens, labels and position_ids",
            stacklevel=4,
        )

    @torch.compiler.disable
    def check_first(
        self,
        tokens: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        packed: bool,
    ) -> None:
        """Warns: labels that are the tokens, a mask that lets tokens see later ones, documents without their mask."""
        is_masked = packed or attention_mask is not None or self._told_of_documents
        # without a call: each token of a generation comes here
        if not is_masked and getattr(tokens, "of_documents", False):
            self._told_of_documents = True
            warnings.warn(
                "the batch of these tokens has a document_begin, which the model was not given: a token attends to "
                "other documents of its row. Give it all of the batch, model(**batch), or document_begin= and "
                "position_ids= as well",
                stacklevel=4,
            )
        if labels is not None and tokens is not None and not self._labels_seen:
            self._labels_seen = True
            if _are_unshifted(tokens, labels):
                warnings.warn(
                    "labels equal tokens wherever they are not -100: labels are the next tokens here, already "
                    "shifted, as Megatron has them (Hugging Face shifts inside). A model of these learns to copy: "
                    "give tokens[:, :-1] and labels=tokens[:, 1:], of labels with -100 labels[:, 1:]",
                    stacklevel=4,
                )
        if attention_mask is not None and not self._mask_seen:
            self._mask_seen = True
            # PyTorch users mean True = keep, or give a padding mask alone: then the future is visible
            if not attention_mask.triu(1).eq(torch.ones_like(attention_mask).triu(1)).all():
                warnings.warn(
                    "attention_mask lets tokens see later ones: a mask of your own takes the place of the causal one "
                    "(True = masked out); combine them with | torch.ones(s, s, dtype=torch.bool).triu(1) unless this "
                    "is meant",
                    stacklevel=4,
                )


def refuse_length(rows: int, ranks: int, longest: int) -> NoReturn:
    """Raise ValueError: so many rows on each context rank are more than the model has positions."""
    given = f" ({rows} on each of {ranks} context ranks; context_batch cuts those of one process)"
    raise ValueError(
        f"sequence length {rows * ranks} is more than max_sequence_length={longest}{given * (ranks > 1)}; shorten "
        "the sequences or build the model with more positions"
    )
