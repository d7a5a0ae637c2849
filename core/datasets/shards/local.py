"""The few shards that lie on this machine: fetched when needed or one ahead, removed when they were read."""

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from core.datasets.card import card_path, sampled_hash
from core.datasets.prefix_lock import LockedError, release_lock, take_lock
from core.datasets.shards.manifest import ShardManifest
from core.datasets.token_file import TokenFile, file_paths

# (name of the shard, folder): puts name.bin, name.idx and what lies beside there
Fetch = Callable[[str, Path], None]
# how often a process looks that waits for the one that fetches
_POLL_S = 0.2


@dataclass(frozen=True)
class CommandFetch:
    """Fetches by a command with `{name}` and `{directory}` in it, without a shell. Raises ValueError: it failed."""

    command: str

    def __call__(self, name: str, directory: Path) -> None:
        values = {"{name}": name, "{directory}": str(directory)}
        words = [
            re.sub(r"\{name\}|\{directory\}", lambda found: values[found[0]], word)
            for word in shlex.split(self.command)
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise ValueError(
                f"data.fetch ended with {done.returncode} for shard {name}: {said or 'it said nothing'}"
            )


class LocalShards:
    """Shards in `directory`; those that are not there are brought by `fetch`, and these alone are removed again.

    Processes of one machine share a directory. A shard is fetched, opened and removed under its lock (`prefix_lock`),
    so one fetches, the others wait, and none is removed while another process opens it.
    """

    def __init__(
        self, manifest: ShardManifest, directory: str | Path, fetch: Fetch | None = None
    ) -> None:
        self.manifest = manifest
        self.directory = Path(directory)
        self.fetch = fetch
        self._ahead: dict[int, threading.Thread] = {}

    def open(self, number: int) -> TokenFile:
        """Shard `number`, brought if need be. Raises ValueError: it is not that of the list, it cannot be brought."""
        shard = self.manifest.shards[number]
        with self._locked(number):
            file = self._is_here(number) or self._bring(number)
            actual_hash = sampled_hash(file_paths(file.prefix)[0])
        if (file.num_tokens, actual_hash) != (shard.tokens, shard.hash):
            raise ValueError(
                f"{file.prefix} has {file.num_tokens} tokens (hash {actual_hash[:12]}), the list of shards says "
                f"{shard.tokens} ({shard.hash[:12]}); fetch it again, or write the list anew"
            )
        return file

    def bring_ahead(self, number: int) -> None:
        """Fetch shard `number` beside the training; what goes wrong is told when it is needed."""
        if (
            self.fetch is None
            or number in self._ahead
            or file_paths(self._prefix(number))[1].is_file()
        ):
            return

        def bring() -> None:
            # `open` tries again, and tells
            with contextlib.suppress(Exception), self._locked(number):
                if self._is_here(number) is None:
                    self._bring(number)

        self._ahead[number] = threading.Thread(target=bring, daemon=True)
        self._ahead[number].start()

    def keep(self, numbers: Collection[int]) -> None:
        """Remove the other shards that were fetched. Who has one open goes on reading it."""
        for number in range(len(self.manifest.shards)):
            if number in numbers or not self._mark_path(number).exists():
                continue
            self._ahead.pop(number, None)
            prefix = self._prefix(number)
            beside = [card_path(prefix), Path(f"{prefix}.tokenizer.json")]
            # locked: another process needs it now; the next call comes by again
            with contextlib.suppress(LockedError), self._locked(number, wait=False):
                for path in (*reversed(file_paths(prefix)), *beside, self._mark_path(number)):
                    path.unlink(missing_ok=True)

    def _prefix(self, number: int) -> Path:
        return self.directory / self.manifest.shards[number].name

    def _mark_path(self, number: int) -> Path:
        return Path(f"{self._prefix(number)}.fetched")

    @contextlib.contextmanager
    def _locked(self, number: int, wait: bool = True) -> Iterator[None]:
        """Alone with the shard on this machine. Raises LockedError: without `wait`, where another has it."""
        # without `fetch` nothing is written or removed, and the folder may be read-only
        if self.fetch is None:
            yield
            return
        prefix = self._prefix(number)
        self.directory.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                lock = take_lock(prefix)
                break
            except LockedError:
                if not wait:
                    raise
                time.sleep(_POLL_S)
            except OSError:
                # a folder that is read-only: nothing is removed there, and what cannot be fetched is told
                lock = None
                break
        try:
            yield
        finally:
            release_lock(prefix, lock)

    def _is_here(self, number: int) -> TokenFile | None:
        try:
            return TokenFile(self._prefix(number))
        except FileNotFoundError:
            return None

    def _bring(self, number: int) -> TokenFile:
        prefix = self._prefix(number)
        name = self.manifest.shards[number].name
        if self.fetch is None:
            raise ValueError(
                f"shard {name} is not in {self.directory}; copy it there, or say how: data.fetch"
            )
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=self.directory) as folder:
            self.fetch(name, Path(folder))
            TokenFile(Path(folder) / name)
            index = f"{name}.idx"
            # without the index nothing opens
            for path in (*sorted({*os.listdir(folder)} - {index}), index):
                if path == index:
                    self._mark_path(number).touch()
                os.replace(Path(folder) / path, self.directory / path)
        return TokenFile(prefix)
