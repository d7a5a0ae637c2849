"""The default corpus: the standard library of the Python that runs, about 10 MB of real text, no download."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Tests are left out because distributions differ in shipping them (17 MB or nothing), installed packages
# because they are not the standard library. `encodings` and `pydoc_data` are generated: near-copies of one
# table would sit on both sides of the split, and one 0.75 MB file of help text would be most of a side.
_EXCLUDED_DIRECTORIES = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
)
# the build settings of one machine
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True)
class SourceFiles:
    """Text files below `root`; `names` are their paths relative to it, with `/`, in corpus order."""

    root: Path
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(
                f"SourceFiles: {len(self.names)} names, {len(set(self.names))} different; list each once"
            )

    def fingerprint(self) -> str:
        """A hash of every file's name, size and modification time: equal when nothing was touched."""
        digest = hashlib.sha256()
        for name in self.names:
            try:
                stat = (self.root / name).stat()
                state = f"{stat.st_size}\0{stat.st_mtime_ns}"
            except OSError:
                # a dangling link, for one; `read_texts` will skip it
                state = "missing"
            digest.update(f"{name}\0{state}\n".encode())
        return digest.hexdigest()


def standard_library(root: Path | None = None) -> SourceFiles:
    """The `*.py` files of the running interpreter's standard library, sorted by relative path.

    `root` replaces the library's directory. Raises `ValueError` if it holds no Python file.
    """
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))
    names = []
    for directory, subdirectories, files in os.walk(root):
        # pruned: site-packages can be huge
        subdirectories[:] = [name for name in subdirectories if _belongs(name)]
        folder = Path(directory).relative_to(root)
        names += [
            (folder / file).as_posix() for file in files if file.endswith(".py") and _belongs(file)
        ]
    if not names:
        raise ValueError(
            f"{root} holds 0 Python files, at least 1 is needed; pass a directory of sources"
        )
    return SourceFiles(root, tuple(sorted(names)))


def _belongs(name: str) -> bool:
    return name not in _EXCLUDED_DIRECTORIES and not name.startswith(_EXCLUDED_PREFIXES)


def read_texts(root: Path, names: Iterable[str]) -> tuple[list[str], int]:
    """The texts of the files that are valid UTF-8, byte for byte, and the number of files skipped.

    A file that cannot be read or decoded is skipped: a corpus is not worth a crash, but it is counted.
    """
    texts = []
    skipped = 0
    for name in names:
        try:
            # bytes, then decode: reading as text would turn \r\n into \n and change the byte count
            texts.append((root / name).read_bytes().decode("utf-8"))
        except (OSError, UnicodeDecodeError):
            skipped += 1
    return texts, skipped


def split_by_hash(
    names: Sequence[str], valid_fraction: float = 0.05
) -> tuple[list[str], list[str]]:
    """(training names, validation names), each in the given order.

    A file's side depends on nothing but its own name, so adding files never moves another from
    validation to training. Raises `ValueError` unless 0 < valid_fraction < 1.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(
            f"valid_fraction={valid_fraction} must lie between 0 and 1, for example 0.05"
        )
    sides: tuple[list[str], list[str]] = ([], [])
    for name in names:
        sides[_unit_hash(name) < valid_fraction].append(name)
    return sides


def _unit_hash(name: str) -> float:
    """A number in [0, 1) from the name alone; Python's own `hash` differs from process to process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
