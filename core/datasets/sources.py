"""Which files are read, and in which order: the same on every machine."""

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT = (".txt", ".md", ".rst", ".py")
LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst")
READ = (*TEXT, *LINES, ".parquet")
_DATASET = "dataset_info.json"  # of a directory that `datasets.save_to_disk` wrote, beside state.json
_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class Source:
    """One file, or one directory of a Hugging Face dataset.

    name: relative to the input that it was found under, with `/`. kind: `text`, `jsonl`, `parquet` or `dataset`.
    size: bytes on disk.
    """

    path: Path
    name: str
    kind: str
    size: int


def find_sources(inputs: Sequence[str | Path], globs: Sequence[str] = ()) -> tuple[list[Source], Counter[str]]:
    """The sources below the inputs, and why files there were skipped.

    A file that is named is read whatever its suffix (as text, if it is none of those known). In a directory, all
    files of a known suffix and those that match one of `globs` (by name, or by relative path) are; hidden files and
    directories are left out. The order is that of a hash of the relative path, so that the end of the
    result is a random part of the text, and the same on every machine.
    Raises `ValueError`: inputs that do not exist, or hold nothing to read.
    """
    if missing := [str(path) for path in inputs if not Path(path).exists()]:
        raise ValueError(f"{', '.join(missing)} of {len(inputs)} inputs do not exist; name files or directories")
    skipped: Counter[str] = Counter()
    found: list[tuple[bytes, int, Source]] = []
    for number, given in enumerate(map(Path, inputs)):
        sources = _below(given, globs, skipped) if given.is_dir() else [_source(given, given.name, globs, named=True)]
        found += [(hashlib.sha256(os.fsencode(s.name)).digest(), number, s) for s in sources if s is not None]
    if not found:
        raise ValueError(
            f"{', '.join(map(str, inputs))}: 0 files to read, {sum(skipped.values())} of other suffixes than "
            f"{' '.join(READ)} (also {' '.join(PACKED)}); name a pattern, for example --glob '*.html'"
        )
    return [source for *_, source in sorted(found, key=lambda entry: entry[:2])], skipped


def _below(root: Path, globs: Sequence[str], skipped: Counter[str]) -> Iterator[Source]:
    for directory, subdirectories, files in os.walk(root):
        here = Path(directory)
        name = here.relative_to(root).as_posix()
        if _SPLITS in files:
            splits = ", ".join(str(here / entry) for entry in sorted(subdirectories))
            raise ValueError(f"{here} is a dataset of {len(subdirectories)} splits; name those to read: {splits}")
        if _DATASET in files and "state.json" in files:
            subdirectories.clear()
            yield Source(here, name, "dataset", sum((here / file).stat().st_size for file in files))
            continue
        subdirectories[:] = [entry for entry in subdirectories if not entry.startswith(".") and entry != "CVS"]
        for file in files:
            if file.startswith("."):
                continue
            source = _source(here / file, (here / file).relative_to(root).as_posix(), globs, named=False)
            if source is None:
                skipped["files of another suffix"] += 1
            else:
                yield source


def _source(path: Path, name: str, globs: Sequence[str], *, named: bool) -> Source | None:
    """None: not to be read."""
    try:
        size = path.stat().st_size
    except OSError:  # a dangling link, for one; reading it will say so
        size = 0
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = (suffixes[:-1] or [""])[-1] if suffixes and suffixes[-1] in PACKED else (suffixes or [""])[-1]
    if suffix in LINES:
        return Source(path, name, "jsonl", size)
    if suffix == ".parquet":
        return Source(path, name, "parquet", size)
    matches = any(fnmatch.fnmatch(path.name, glob) or fnmatch.fnmatch(name, glob) for glob in globs)
    return Source(path, name, "text", size) if named or matches or suffix in TEXT else None
