"""Megatron's `.bin`/`.idx` by the names of its `IndexedDataset`, over our reader and writer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.datasets.token_file import TokenFile, file_paths
from core.datasets.token_file_writer import TokenFileWriter


def get_bin_path(path_prefix: str) -> str:
    """The file of tokens."""
    return str(file_paths(path_prefix)[0])


def get_idx_path(path_prefix: str) -> str:
    """The file of lengths, pointers and documents."""
    return str(file_paths(path_prefix)[1])


class IndexedDataset(torch.utils.data.Dataset):
    """Sequences of tokens, memory mapped; documents are runs of them.

    Raises ValueError: damaged files; multimodal ones; FileNotFoundError.
    """

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True) -> None:
        if multimodal:
            raise ValueError("IndexedDataset reads text only; leave multimodal out")
        self.path_prefix = path_prefix
        self._file = TokenFile(path_prefix)
        if self._file.marks_answers:
            raise ValueError(
                f"{path_prefix} holds {self._file.num_documents} conversations of which the answers are marked, and "
                "Megatron's samples would learn all tokens alike; use core.datasets.conversations.ConversationBatches"
            )
        # the token at which each sequence begins, and the end: sequences lie one after the other in the .bin
        self._starts = np.concatenate([[0], np.cumsum(self._file.sequence_lengths, dtype=np.int64)])

    def __reduce__(self) -> Any:
        # a worker of a DataLoader maps the files itself
        return type(self), (self.path_prefix,)

    def __len__(self) -> int:
        return self._file.num_sequences

    def __getitem__(self, idx: int | slice) -> Any:
        """The tokens of one sequence, or a list for a slice without step."""
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError(f"slices of IndexedDataset go by 1, not {step}")
            return [self.get(i) for i in range(start, stop)]
        return self.get(int(idx))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of sequence `idx` from `offset`, to its end by default."""
        idx = range(len(self))[idx]
        start = int(self._starts[idx])
        end = int(self._starts[idx + 1])
        stop = end if length is None else start + offset + length
        if not start <= start + offset <= stop <= end:
            raise ValueError(
                f"tokens {offset} to {stop - start} of sequence {idx}, which has {end - start}"
            )
        return self._file.tokens(start + offset, stop)

    @property
    def sequence_lengths(self) -> np.ndarray:
        """The length of every sequence, int32."""
        return self._file.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """The sequence at which each document begins, and the end: one more than there are documents."""
        return self._file.document_indices

    def get_document_indices(self) -> np.ndarray:
        return self.document_indices

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files exist."""
        return all(path.is_file() for path in file_paths(path_prefix))


class IndexedDatasetBuilder:
    """Writes documents of one sequence each: `add_item`, `end_document`; `finalize` makes both files appear.

    Raises ValueError: a document of several sequences, a path that does not end in .bin.
    """

    def __init__(
        self, bin_path: str, dtype: npt.DTypeLike = np.int32, multimodal: bool = False
    ) -> None:
        if multimodal:
            raise ValueError("IndexedDatasetBuilder writes text only; leave multimodal out")
        if not bin_path.endswith(".bin"):
            raise ValueError(f"{bin_path!r} must end in .bin; use get_bin_path(prefix)")
        self._prefix = bin_path.removesuffix(".bin")
        # of the document that is being written
        self._open_sequences = 0
        largest = int(np.iinfo(np.dtype(dtype)).max)
        self._writer = TokenFileWriter(
            self._prefix, vocab_size=largest + 1, dtype=dtype
        ).__enter__()

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Write the one sequence of a document."""
        self._open_sequences += 1
        if self._open_sequences > 1:
            raise ValueError(
                f"a document of {self._open_sequences} sequences; join them: samples are cut out of whole documents "
                "anyway"
            )
        self._writer.add_document(np.asarray(tensor))

    def end_document(self) -> None:
        """The next sequence begins another document."""
        self._open_sequences = 0

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Any = None) -> None:
        self.add_item(tensor)
        self.end_document()

    def finalize(self, idx_path: str) -> None:
        """Write both files. Raises ValueError: an .idx that does not belong to the .bin."""
        if idx_path != get_idx_path(self._prefix):
            raise ValueError(
                f"{idx_path!r} does not belong to {self._prefix}.bin; use get_idx_path(prefix)"
            )
        self._writer.__exit__(None, None, None)
