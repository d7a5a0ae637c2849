"""One directory, or object store's prefix, of checkpoints: begin, publish, find, keep, sweep.

Only what is committed has a name here. `latest` is found by looking, never by a pointer.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from core.dist_checkpointing.format.json_files import canonical_json, parse_json, seal, unseal
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.lock import PATIENCE_S, Heartbeat, Lock, Others
from core.dist_checkpointing.publish.manifest import read_manifest
from core.dist_checkpointing.publish.pointer_commit import PointerCommit
from core.dist_checkpointing.publish.rename_commit import RenameCommit
from core.dist_checkpointing.publish.retention import Facts, Retention
from core.dist_checkpointing.storage.address import check_name
from core.dist_checkpointing.storage.checkpoint_dir import (
    CheckpointDir,
    KvCheckpointDir,
    PosixCheckpointDir,
    open_dir,
)
from core.dist_checkpointing.storage.fs import Fs

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})")
_FACTS = ".retention.json"


def step_name(step: int) -> str:
    """The name of a step's checkpoint. ValueError: the step is negative."""
    if step < 0:
        raise ValueError(f"step {step}: steps count from 0")
    return f"step-{step:08d}"


class CheckpointRoot:
    """The checkpoints of one run. `stale_s`: a temporary not written for so long has no writer any more."""

    def __init__(
        self, url: str | os.PathLike[str] | KvCheckpointDir, *, stale_s: float = 60.0, fs: Fs | None = None
    ) -> None:
        self.files = url if isinstance(url, KvCheckpointDir) else open_dir(url, fs)
        self.url, self.stale_s = self.files.url, stale_s
        self._at = (
            RenameCommit(self.files) if isinstance(self.files, PosixCheckpointDir) else PointerCommit(self.files)
        )

    def _named(self, name: int | str) -> str:
        text = step_name(name) if isinstance(name, int) else name
        check_name(text, local=isinstance(self.files, PosixCheckpointDir))
        return text

    def lock(self) -> Lock:
        """Keeps other jobs out. ValueError: another one is in."""
        self._at.prepare()
        return Lock(self.files, stale_s=self.stale_s)

    # saving

    def begin(self, name: int | str, uuid: str) -> CheckpointDir:
        """A new temporary for a step or name; `uuid` is a uuid4().hex that no other attempt has.

        The attempt may replace the checkpoint that has the name now, and no other.
        """
        assert re.fullmatch("[0-9a-f]{32}", uuid), uuid
        name = self._named(name)
        note = {"pid": os.getpid(), "replaces": self._at.identity(name), "time": time.time()}
        self._at.create(name, uuid, canonical_json(note))
        return self._at.temporary(name, uuid)

    def temporary(self, name: int | str, uuid: str) -> CheckpointDir:
        """The place that `begin` made, seen from another process."""
        return self._at.temporary(self._named(name), uuid)

    def is_begun(self, name: int | str, uuid: str) -> bool:
        """Whether `begin` was called and the attempt neither given up nor committed."""
        try:
            self._at.note(self._named(name), uuid)
        except FileNotFoundError:
            return False
        return True

    def beating(
        self, name: int | str, uuid: str, every: float = 1.0, orphaned: Callable[[], bool] = lambda: False
    ) -> Heartbeat:
        """Keeps the temporary from being swept while it is written, unless it is orphaned. A context."""
        name = self._named(name)
        return Heartbeat(lambda: None if orphaned() else self._at.beat(name, uuid), every)

    def others(self, name: int | str, uuid: str, orphaned: Callable[[], bool]) -> Others:
        """To be called while one waits for other ranks: raises Orphaned when none of them writes any more."""
        return Others(orphaned, partial(self._at.last_beat, self._named(name), uuid))

    def publish(self, name: int | str, uuid: str, manifest: bytes, files: Iterable[str]) -> None:
        """Gives the temporary its name, durably. Raises RuntimeError: it was swept, or another attempt was faster."""
        name = self._named(name)
        self._forget(name)
        try:
            replaces = parse_json(self._at.note(name, uuid), f"the heartbeat of {name}")["replaces"]
            published = self._at.publish(name, uuid, replaces, manifest, files)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{self.url}{name}: its temporary {uuid} is gone ({error}); another job swept it because it was not "
                "written for too long: save again"
            ) from error
        if not published:
            raise RuntimeError(
                f"{self.url}{name} was committed by another attempt, {self._at.identity(name)}, while {uuid} was "
                "being written; two jobs save into one directory: stop one"
            )

    def publish_folder(self, name: str, uuid: str) -> None:
        """Makes a local temporary a directory that is no checkpoint. ValueError: the name is taken."""
        assert isinstance(self._at, RenameCommit)
        if not self._at.publish_folder(name, uuid):
            raise ValueError(f"{self.url}{name} was made by another program meanwhile; choose another name")

    def abandon(self, name: int | str, uuid: str) -> None:
        """Removes the temporary of an attempt that failed, but nothing that was committed after all."""
        if self._at.identity(self._named(name)) != uuid:
            self._at.abandon(self._named(name), uuid)

    def wait_for(
        self, name: int | str, uuid: str, timeout_s: float, waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Returns when that attempt is committed, seen from a rank that does not commit.

        `waiting` is called meanwhile. Raises RuntimeError: it never will be. TimeoutError.
        """
        name, end, pause = self._named(name), time.monotonic() + timeout_s, 0.002
        while self._at.identity(name) != uuid:
            if not self._at.exists(name, uuid) and self._at.identity(name) != uuid:
                raise RuntimeError(f"{self.url}{name}: the attempt {uuid} was given up; rank 0 tells why")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.url}{name}: not committed after {timeout_s} s; rank 0 tells why")
            waiting()
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    # finding

    def steps(self) -> list[int]:
        """Every committed step, ascending. None of them is verified."""
        steps = [int(found[1]) for name in self._at.names() if (found := _STEP.fullmatch(name))]
        return sorted(steps)

    def open(self, name: int | str) -> CheckpointDir:
        """The checkpoint of a step or name. ValueError: there is none."""
        place = self._at.open(self._named(name))
        if place is None:
            known = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"{self.url} has no checkpoint {self._named(name)}; steps there: {known}")
        return place

    def latest(self) -> int | None:
        """The newest step with a valid manifest."""
        return next((step for step in reversed(self.steps()) if self._has_manifest(step)), None)

    def problems(self, step: int, *, digests: bool = False, full: bool = False) -> list[str]:
        """`check` of a step, where a step that cannot be found is a problem like others."""
        try:
            return check(self.open(step), digests=digests, full=full)
        except (OSError, ValueError) as error:
            return [str(error)]

    def _has_manifest(self, step: int) -> bool:
        try:
            read_manifest(self.open(step))
        except (OSError, ValueError):
            return False
        return True

    # keeping

    def tag(self, tag: str, step: int) -> None:
        """Lets `tag` name a step, which retention then keeps."""
        self.open(step)
        self._at.prepare("tags")
        self.files.write(f"tags/{self._named(tag)}.json", canonical_json({"step": step}))

    def untag(self, tag: str) -> None:
        """Removes a tag, not the step it names."""
        self.files.remove(f"tags/{self._named(tag)}.json")

    def tags(self) -> dict[str, int]:
        """The tags of this root: name -> number of the step that it protects."""
        names = [name for name in self.files.names("tags") if name.endswith(".json")]
        found = {name: parse_json(self.files.read(name), self.url + name) for name in names}
        bad = [name for name, tag in found.items() if not (isinstance(tag, dict) and type(tag.get("step")) is int)]
        if bad:
            raise ValueError(f'{self.url}{bad[0]}: no {{"step": number}}; write the tag again')
        return {name.removeprefix("tags/").removesuffix(".json"): tag["step"] for name, tag in found.items()}

    def retain(self, keep_last: int = 3, keep_every: int | None = None, **rules: Any) -> list[int]:
        """Removes old steps and returns them: to be called after a commit. Which ones, `surplus` says."""
        removed = self.surplus(keep_last, keep_every, **rules)
        for step in removed:
            self._at.remove(step_name(step))
        return removed

    def surplus(self, keep_last: int = 3, keep_every: int | None = None, **rules: Any) -> list[int]:
        """The steps that need not be kept by `Retention(keep_last=..., keep_every=..., **rules)`.

        Kept whatever it says: tagged steps, the newest that verifies with everything newer, and what holds a user's
        files, which is said. Reads `keep_last` manifests, and those of steps that `.retention.json` does not know
        where a rule needs more than numbers.
        """
        retention = Retention(keep_last=keep_last, keep_every=keep_every, **rules)
        steps, whole, verified = self.steps(), set[int](), None
        for step in reversed(steps):
            if verified is None and not self.problems(step, digests=True):
                verified = step
            if self._has_manifest(step):
                whole.add(step)
            if verified is not None and len(whole) >= keep_last:
                break
        if verified is None:
            return []
        facts = self.facts(steps) if retention.reads_facts else {}
        kept = whole | set(self.tags().values()) | retention.kept(steps, facts)
        old = {step: self._at.strangers(step_name(step)) for step in steps if step < verified and step not in kept}
        if shared := [step for step, others in old.items() if others]:
            text = "%s keeps %d old steps: %s holds %s, which belongs to no checkpoint; move that"
            log.warning(text, self.url, len(shared), step_name(shared[0]), old[shared[0]][0])
        return [step for step, others in old.items() if not others]

    def facts(self, steps: Collection[int]) -> dict[int, Facts]:
        """What the manifests of steps tell; those without a valid one are left out. Remembered beside the steps."""
        before = self._remembered()
        known = {step: found for step, found in (before or {}).items() if step in steps}
        for step in set(steps) - known.keys():
            with contextlib.suppress(OSError, ValueError):
                known[step] = Facts.of_run(read_manifest(self.open(step)).run)
        self._remember(known, before)
        return known

    def _remember(self, known: Mapping[int, Facts], before: Mapping[int, Facts] | None) -> None:
        if before is not None and known != before:
            told = {str(step): [facts.time, dict(facts.metrics)] for step, facts in known.items()}
            self.files.write(_FACTS, seal({"format": 1, "steps": told}))

    def _forget(self, name: str) -> None:
        """Before it is saved again: what was remembered of it is no more true."""
        if before := self._remembered():
            self._remember({step: facts for step, facts in before.items() if step_name(step) != name}, before)

    def _remembered(self) -> dict[int, Facts] | None:
        """None: a file of that name is not ours, so manifests are read each time."""
        try:
            told = unseal(self.files.read(_FACTS), self.url + _FACTS)["steps"]
            return {int(step): Facts(time, metrics) for step, (time, metrics) in told.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    # after a crash

    def sweep(self, name: int | str | None = None, *, thorough: bool = False) -> list[str]:
        """Removes what killed jobs left, and puts back a checkpoint whose replacement was never finished. With a
        `name`: in an object store only what belongs to it. `thorough`: there also what its index does not tell."""
        return self._at.sweep(self.stale_s, "" if name is None else self._named(name), thorough=thorough)

    def leftovers(self, *, thorough: bool = False) -> list[str]:
        """What `sweep` would remove."""
        return self._at.leftovers(self.stale_s, thorough=thorough)

    def watch(self) -> None:
        """Returns when a sweep knows what is still being written: in an object store after `stale_s` at most."""
        self._at.watch(self.stale_s)

    def wait_for_writers(self, timeout_s: float, poll_s: float = 0.1) -> None:
        """Returns when every temporary is committed or stale: a job that was killed may have left a writer that still
        finishes. Raises TimeoutError naming those that are neither."""
        end, told = time.monotonic() + timeout_s, False
        while live := [f"{name} ({uuid})" for (name, uuid), age in self._at.ages().items() if age < self.stale_s]:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.url}: after {timeout_s} s still being written: {', '.join(live)}")
            if not told and time.monotonic() > end - timeout_s + PATIENCE_S:
                text = "%s: waits for a writer that a killed job left, %s; at most %.0f s after its last heartbeat"
                log.warning(text, self.url, live[0], self.stale_s)
                told = True
            time.sleep(poll_s)
            poll_s = max(poll_s, min(2 * poll_s, 1.0))  # of an object store each look is paid for
