"""From files of text to one token file, on all cores."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from core.datasets.card import TokenCard, card_path, read_card, tokenizer_path
from core.datasets.corpus.documents import CHUNK_BYTES, Encoder, TextChunk
from core.datasets.corpus.readers import read_chunks
from core.datasets.corpus.sources import TextSource, find_sources
from core.datasets.corpus.tables import first_row_of
from core.datasets.corpus.workers import available_cores, encode_all
from core.datasets.token_file import file_paths
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer

DOCUMENTS = ("file", "paragraph", "line")
# of text a tokenizer is trained on: the first files in the order of the corpus
LEARNED_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class CorpusFiles:
    """What `prepare_files` wrote. prefix: for `TokenFile`. seconds: of reading, tokenising and writing."""

    prefix: Path
    card: TokenCard
    files: tuple[Path, ...]
    seconds: float


def _no_progress(nbytes: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """What is read, and how it becomes documents.

    inputs: files and directories. globs: patterns of further names to read as text. documents: what a document is in
    a text file, `file`, `paragraph` or `line`. text_key: the field of a JSON line, or the column of a table.
    sources: in the order in which they are read; passed_over: reason -> how many files are not read for it.
    Raises `ValueError`: inputs that are missing or hold nothing to read.
    """

    inputs: tuple[str, ...]
    globs: tuple[str, ...] = ()
    documents: str = "file"
    text_key: str = "text"
    sources: tuple[TextSource, ...] = field(init=False, repr=False)
    passed_over: Counter[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.documents not in DOCUMENTS:
            raise ValueError(f"documents={self.documents!r} is none of {', '.join(DOCUMENTS)}")
        sources, skipped = find_sources(self.inputs, self.globs)
        object.__setattr__(self, "sources", tuple(sources))
        object.__setattr__(self, "passed_over", skipped)

    @property
    def num_bytes(self) -> int:
        """Size of the sources on disk, in bytes."""
        return sum(source.size for source in self.sources)

    def chunks(self, skipped: Counter[str], *, rows: bool = False) -> Iterator[TextChunk]:
        """The content; what is not read is counted in `skipped`. rows: see `read_chunks`."""
        skipped.update(self.passed_over)
        return read_chunks(
            self.sources, skipped, documents=self.documents, text_key=self.text_key, rows=rows
        )

    def texts(self, encoder: Encoder, limit: int = LEARNED_BYTES) -> Iterator[str]:
        """Documents, or parts of large ones, until `limit` bytes are reached: what a tokenizer learns from."""
        size = 0
        for chunk in self.chunks(Counter()):
            for text in encoder.texts(chunk):
                size += len(text)
                yield text.decode()
            if size >= limit:
                return


def prepare_files(
    text: TextFiles,
    output: str | Path,
    tokenizer: AnyTokenizer,
    *,
    workers: int | None = None,
    append_end_of_text: bool = True,
    advance: Callable[[int], None] = _no_progress,
) -> CorpusFiles:
    """Write `output.bin`, `.idx`, `.json` (the card) and `.tokenizer.json`; the same bytes for any number of workers.

    `workers`: processes, default one per core. `append_end_of_text`: close each document with the tokenizer's end of
    text. `advance` is called with the number of bytes on disk that are done. An interrupted call leaves nothing that
    opens, and an earlier file as it was. Processes import the calling script: there, call it under
    `if __name__ == "__main__":`.
    Raises `ValueError`: no document in all of the text, or `output` is no prefix; `ImportError`: an extra is
    needed; `OSError`; and as `TokenFileWriter`.
    """
    begin = time.perf_counter()
    prefix = checked_prefix(output)
    # the writer takes the lock of the prefix, and renames the files only if all went well
    end = tokenizer.end_of_text if append_end_of_text else None
    with TokenFileWriter(
        prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        end_of_text=end,
        sources=text.inputs,
    ) as writer:
        encoder = Encoder(
            tokenizer=tokenizer, dtype=writer.dtype, end_of_text=end, text_key=text.text_key
        )
        spelt: Counter[str] = Counter()
        # results come in the order of the jobs, so that the file does not depend on the number of workers
        jobs = _jobs(text.chunks(writer.skipped))
        with closing(encode_all(jobs, encoder, _processes(workers, text.num_bytes))) as results:
            for job, result in results:
                writer.add_documents(
                    result.tokens, result.lengths.tolist(), continued=result.continued
                )
                writer.text_bytes += result.text_bytes
                writer.skipped.update(result.skipped)
                spelt.update(result.spelt)
                advance(sum(chunk.size for chunk in job))
        if not writer.num_documents:
            raise ValueError(
                f"0 documents in {len(text.sources)} files, skipped: {skipped_text(writer.skipped)}; "
                f"{_keys_told(text.sources)}check --text-key (of core.datasets.prepare) and the encoding (UTF-8)"
            )
    _tell_of_special_tokens(spelt)
    card = read_card(prefix)
    assert card is not None
    files = [
        path
        for path in (*file_paths(prefix), card_path(prefix), tokenizer_path(prefix))
        if path.exists()
    ]
    return CorpusFiles(
        prefix=prefix, card=card, files=tuple(files), seconds=time.perf_counter() - begin
    )


def _tell_of_special_tokens(spelt: Counter[str]) -> None:
    """Warn of texts that spell them out: a rendered chat, or files that were joined by the end of text."""
    if spelt:
        warnings.warn(
            f"{spelt.total()} texts spell out special tokens ({', '.join(sorted(spelt)[:4])}), which stay text: no "
            "text of a corpus becomes a special token. Chats that a template wrote are given as rows of messages, or "
            "of prompt and response, where these are such tokens",
            stacklevel=3,
        )


def _keys_told(sources: Sequence[TextSource]) -> str:
    """The keys of a first row, and those that are wanted; empty where nothing has rows."""
    for source in sources:
        row = first_row_of(source)
        if isinstance(row, dict):
            return (
                f"the rows of {source.path} have {', '.join(map(repr, row))}, wanted is "
                '{"messages": [...]}, {"prompt": ..., "response": ...} or {"text": ...}: write one of them, or '
            )
    return ""


def checked_prefix(output: str | Path) -> Path:
    """The prefix of the files to write; raises `ValueError` if it is a directory, or the name of one of the files."""
    prefix = Path(output)
    if str(output).endswith("/") or prefix.is_dir():
        raise ValueError(
            f"output {output} is a directory, a prefix of files is needed; write {prefix / 'corpus'}"
        )
    if prefix.suffix in (".bin", ".idx"):
        raise ValueError(
            f"output {prefix} is a prefix of several files; write {prefix.with_suffix('')}"
        )
    return prefix


def _processes(workers: int | None, num_bytes: int) -> int:
    """As many as asked for, or cores, but no more than there can be jobs: text is packed by a factor of 8 at most."""
    requested = available_cores() if workers is None else workers
    return min(requested, 1 + 8 * num_bytes // CHUNK_BYTES)


def _jobs(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Chunks together until there are enough for one message to a worker process."""
    # small files would else cost a message each
    job: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        job.append(chunk)
        size += _content_size(chunk.content)
        if size >= CHUNK_BYTES:
            yield job
            job = []
            size = 0
    if job:
        yield job


def _content_size(content: bytes | Sequence[object]) -> int:
    if isinstance(content, bytes):
        return len(content)
    return sum(len(text) for text in content if isinstance(text, str))


def skipped_text(skipped: Counter[str] | dict[str, int]) -> str:
    """`3 binary files, 1 empty documents`, or `nothing`."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "nothing"
