"""Which files are read, and in which order: the same on every machine."""

import fnmatch
import hashlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from core.datasets.corpus.hub import hub_files, hub_remedy, is_hub_name
from core.datasets.corpus.opening import PACKED, holds_rows, is_json, suffix_of

TEXT = (".txt", ".md", ".rst", ".py")
LINES = (".jsonl", ".ndjson")
READ = (*TEXT, *LINES, ".parquet")
SUFFIXES = (*READ, *(suffix + packed for suffix in (*TEXT, *LINES) for packed in PACKED))
# of a directory that `datasets.save_to_disk` wrote, beside state.json
_DATASET = "dataset_info.json"
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
# names of parts that are not trained on
_HELD_OUT = ("test", "valid", "validation", "val", "dev", "eval")
_OTHER_SUFFIX = "files of another suffix"


@dataclass(frozen=True)
class TextSource:
    """One file, or one directory of a Hugging Face dataset.

    name: relative to the input that it was found under, with `/`. kind: `text`, `jsonl` (rows; an array of
    them, too), `parquet` or `dataset`. size: bytes on disk.
    """

    path: Path
    name: str
    kind: str
    size: int


def find_sources(
    inputs: Sequence[str | Path], globs: Sequence[str] = ()
) -> tuple[list[TextSource], Counter[str]]:
    """The sources below the inputs, and why files there were skipped.

    A file that is named is read whatever its suffix (as text, if it is none of those known). In a directory, all
    files of a known suffix and those that match one of `globs` (by name, or by relative path) are; hidden files and
    directories are left out, links to directories are followed. Each file is found once, however often inputs and
    links lead to it. The order is that of a hash of the relative path, so that the end of the
    result is a random part of the text, and the same on every machine. Names of the Hub stand for their files.
    Raises `ValueError`: inputs that do not exist, or hold nothing to read.
    """
    inputs = _local_inputs(inputs)
    # all at once: who typed three wrong names should not correct them one by one
    missing = [str(path) for path in inputs if not Path(path).exists()]
    if len(missing) == 1:
        raise ValueError(
            f"input {missing[0]} does not exist; name files or directories{hub_remedy(missing[0])}"
        )
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(inputs)} inputs do not exist: {', '.join(missing)}; name files or directories"
        )
    search = _SourceSearch(globs)
    # sorted by the hash of the name, then by the input: equal names in two inputs stay in the order of the inputs
    hashed_sources: list[tuple[bytes, int, TextSource]] = []
    for number, path in enumerate(map(Path, inputs)):
        if path.is_dir():
            found = search.below(path)
        else:
            found = search.file(path, path.name, named=True)
        for source in found:
            name_hash = hashlib.sha256(os.fsencode(source.name)).digest()
            hashed_sources.append((name_hash, number, source))
    if not hashed_sources:
        other_suffixes = search.skipped.pop(_OTHER_SUFFIX, 0)
        rest = "".join(f", {count} {reason}" for reason, count in sorted(search.skipped.items()))
        raise ValueError(
            f"{', '.join(map(str, inputs))}: 0 files to read, {other_suffixes} of other suffixes than "
            f"{' '.join(READ)} and .json of rows (also {' '.join(PACKED)}){rest}; "
            "name a pattern, for example --glob '*.html'"
        )
    sources = [source for *_, source in sorted(hashed_sources, key=lambda entry: entry[:2])]
    _tell_of_held_out(sources)
    return sources, search.skipped


def _tell_of_held_out(sources: Sequence[TextSource]) -> None:
    """Who names a folder of `train.jsonl` and `test.jsonl` gets both."""
    split_of = {
        source.path: re.split(r"[-_.]", source.path.name)[0]
        for source in sources
        if source.kind in ("jsonl", "parquet")
    }
    folders = {path.parent for path, split in split_of.items() if split == "train"}
    held_out = [
        path for path, split in split_of.items() if split in _HELD_OUT and path.parent in folders
    ]
    if held_out:
        warnings.warn(
            f"{held_out[0]} ({len(held_out)} of such a name) is read as the files of train beside it are; name those "
            "alone where it is to be held out",
            stacklevel=4,
        )


def _local_inputs(inputs: Sequence[str | Path]) -> list[str | Path]:
    """Files in the place of names of the Hub."""
    local: list[str | Path] = []
    for name in inputs:
        if is_hub_name(name):
            local += hub_files(str(name), SUFFIXES)
        else:
            local.append(name)
    return local


class _SourceSearch:
    """A look through all inputs that finds no file twice. skipped: reason -> how many."""

    def __init__(self, globs: Sequence[str]) -> None:
        self.skipped: Counter[str] = Counter()
        self._globs = globs
        # resolved paths of files, and of datasets
        self._known_paths: set[str] = set()

    def below(self, root: Path) -> Iterator[TextSource]:
        """The sources in a directory. Its links to directories come last: a link renames nothing that is there."""
        waiting = [root]
        entered = set[str]()
        for start in waiting:
            for directory, subdirectories, files in os.walk(start, onerror=self._unreadable):
                resolved = os.path.realpath(directory)
                # links may form a circle, or lead to a directory that is also read by its own name
                if resolved in entered:  # by a link, which may lead back to where it lies
                    self.skipped["directories given twice"] += 1
                    subdirectories.clear()
                    continue
                entered.add(resolved)
                folder = Path(directory)
                yield from self._directory(root, folder, resolved, subdirectories, files)
                waiting += [
                    folder / entry for entry in subdirectories if (folder / entry).is_symlink()
                ]

    def _unreadable(self, error: OSError) -> None:
        self.skipped["directories that cannot be read"] += 1

    def _directory(
        self, root: Path, folder: Path, resolved: str, subdirectories: list[str], files: list[str]
    ) -> Iterator[TextSource]:
        """What is in one directory; leaves those of `subdirectories` that are to be looked into, in order."""
        name = folder.relative_to(root).as_posix()
        if _SPLITS in files and subdirectories[1:]:
            splits = ", ".join(str(folder / entry) for entry in sorted(subdirectories))
            raise ValueError(
                f"{folder} is a dataset of {len(subdirectories)} splits; name those to read: {splits}"
            )
        # a saved dataset is one source, not the files it consists of
        if _DATASET in files and _STATE in files:
            subdirectories.clear()
            if self._is_new(resolved):
                yield TextSource(
                    folder, name, "dataset", sum((folder / file).stat().st_size for file in files)
                )
            return
        if {_DATASET, _STATE} & {*files} and any(file.endswith(".arrow") for file in files):
            missing = _STATE if _DATASET in files else _DATASET
            raise ValueError(
                f"{folder} has .arrow files and no {missing}: it is half of a dataset of save_to_disk, or a cache of "
                "load_dataset; save it by dataset.save_to_disk(DIRECTORY)"
            )
        subdirectories[:] = sorted(
            entry for entry in subdirectories if not entry.startswith(".") and entry != "CVS"
        )
        for file in sorted(files):
            if not file.startswith(".") and file != _SPLITS:
                path = folder / file
                yield from self.file(path, path.relative_to(root).as_posix(), named=False)

    def file(self, path: Path, name: str, *, named: bool) -> Iterator[TextSource]:
        """The source that the file is, if it is one."""
        try:
            stat = path.stat()
            size = stat.st_size
            regular = S_ISREG(stat.st_mode)
        except OSError:
            # a dangling link, for one; reading it will say so
            size = 0
            regular = True
        source = _source_of_file(path, name, size, self._globs, named=named)
        if source is None:
            self.skipped[_OTHER_SUFFIX] += 1
        elif not regular:
            # reading a pipe would wait for its writer
            self.skipped["pipes, sockets and devices"] += 1
        elif self._is_new(os.path.realpath(path)):
            yield source

    def _is_new(self, resolved: str) -> bool:
        if resolved in self._known_paths:
            self.skipped["files given twice"] += 1
            return False
        self._known_paths.add(resolved)
        return True


# of rows and columns, of which nothing says which column is the text
_TABLES = (".csv", ".tsv")


def _source_of_file(
    path: Path, name: str, size: int, globs: Sequence[str], *, named: bool
) -> TextSource | None:
    """None: not to be read."""
    suffix = suffix_of(path)
    if suffix in LINES:
        return TextSource(path, name, "jsonl", size)
    if suffix == ".parquet":
        return TextSource(path, name, "parquet", size)
    is_possible = is_json(path) and path.is_file()  # no pipe is opened
    if is_possible and holds_rows(path):
        return TextSource(path, name, "jsonl", size)
    matches = any(fnmatch.fnmatch(path.name, glob) or fnmatch.fnmatch(name, glob) for glob in globs)
    if named and is_possible and not matches:
        raise ValueError(
            f"{path} is neither an array of rows ([{{...}}, ...]) nor JSON lines ({{...}}, one a line), and is not "
            "learned as text; write one of them, or the text as .txt"
        )
    if named and not matches and suffix in _TABLES:
        raise ValueError(
            f"{path} is a table, whose header and separators would be learned as text; write its rows as JSON lines, "
            "as pandas' read_csv(FILE).to_json('rows.jsonl', orient='records', lines=True) does, or the text as .txt"
        )
    if named or matches or suffix in TEXT:
        return TextSource(path, name, "text", size)
    return None
