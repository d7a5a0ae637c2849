"""One directory, or object store's prefix, of checkpoints: begin, publish, find, retain, sweep.

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
from core.dist_checkpointing.publish.lock import PATIENCE_S, Heartbeat, Lock, OtherRanks
from core.dist_checkpointing.publish.manifest import read_manifest
from core.dist_checkpointing.publish.pointer_commit import PointerCommit
from core.dist_checkpointing.publish.rename_commit import RenameCommit
from core.dist_checkpointing.publish.retention import Retention, StepFacts
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
        self,
        url: str | os.PathLike[str] | KvCheckpointDir,
        *,
        stale_s: float = 60.0,
        fs: Fs | None = None,
    ) -> None:
        self.files = url if isinstance(url, KvCheckpointDir) else open_dir(url, fs)
        self.url = self.files.url
        self.stale_s = stale_s
        self._strategy = self._commit_strategy()

    def _commit_strategy(self) -> RenameCommit | PointerCommit:
        """Directories are committed by a rename; object stores have none, there a pointer is put."""
        if isinstance(self.files, PosixCheckpointDir):
            return RenameCommit(self.files)
        return PointerCommit(self.files)

    def _checked_name(self, name: int | str) -> str:
        """The name of a step, or a name. ValueError: it cannot be one."""
        text = step_name(name) if isinstance(name, int) else name
        check_name(text, local=isinstance(self.files, PosixCheckpointDir))
        return text

    def lock(self) -> Lock:
        """Keeps other jobs out. ValueError: another one is in."""
        self._strategy.prepare()
        return Lock(self.files, stale_s=self.stale_s)

    # Saving

    def begin(self, name: int | str, uuid: str) -> CheckpointDir:
        """A new temporary for a step or name; `uuid` is a uuid4().hex that no other attempt has.

        The attempt may replace the checkpoint that has the name now, and no other.
        """
        assert re.fullmatch("[0-9a-f]{32}", uuid), uuid
        name = self._checked_name(name)
        note = {"pid": os.getpid(), "replaces": self._strategy.identity(name), "time": time.time()}
        self._strategy.create(name, uuid, canonical_json(note))
        return self._strategy.temporary(name, uuid)

    def temporary(self, name: int | str, uuid: str) -> CheckpointDir:
        """The directory that `begin` made, seen from another process."""
        return self._strategy.temporary(self._checked_name(name), uuid)

    def is_begun(self, name: int | str, uuid: str) -> bool:
        """Whether `begin` was called and the attempt neither given up nor committed."""
        try:
            self._strategy.note(self._checked_name(name), uuid)
        except FileNotFoundError:
            return False
        return True

    def beating(
        self,
        name: int | str,
        uuid: str,
        every: float = 1.0,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> Heartbeat:
        """Keeps the temporary from being swept while it is written, unless it is orphaned. A context."""
        name = self._checked_name(name)
        return Heartbeat(lambda: None if orphaned() else self._strategy.beat(name, uuid), every)

    def other_ranks(self, name: int | str, uuid: str, orphaned: Callable[[], bool]) -> OtherRanks:
        """To be called while one waits for other ranks: raises Orphaned when none of them writes any more."""
        return OtherRanks(
            orphaned, partial(self._strategy.last_beat, self._checked_name(name), uuid)
        )

    def publish(self, name: int | str, uuid: str, manifest: bytes, files: Iterable[str]) -> None:
        """Gives the temporary its name, durably. Raises RuntimeError: it was swept, or another attempt was faster."""
        name = self._checked_name(name)
        # before the commit: a crash behind it must not leave the old step's time and metrics
        self._forget(name)
        try:
            replaces = parse_json(self._strategy.note(name, uuid), f"the heartbeat of {name}")[
                "replaces"
            ]
            published = self._strategy.publish(name, uuid, replaces, manifest, files)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{self.url}{name}: its temporary {uuid} is gone ({error}); another job swept it because it was not "
                "written for too long: save again"
            ) from error
        if not published:
            raise RuntimeError(
                f"{self.url}{name} was committed by another attempt, {self._strategy.identity(name)}, while {uuid} "
                "was being written; two jobs save into one directory: stop one"
            )

    def publish_folder(self, name: str, uuid: str) -> None:
        """Makes a local temporary a directory that is no checkpoint. ValueError: the name is taken."""
        assert isinstance(self._strategy, RenameCommit)
        if not self._strategy.publish_folder(name, uuid):
            raise ValueError(
                f"{self.url}{name} was made by another program meanwhile; choose another name"
            )

    def abandon(self, name: int | str, uuid: str) -> None:
        """Removes the temporary of an attempt that failed, but nothing that was committed after all."""
        if self._strategy.identity(self._checked_name(name)) != uuid:
            self._strategy.abandon(self._checked_name(name), uuid)

    def wait_for(
        self,
        name: int | str,
        uuid: str,
        timeout_s: float,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when that attempt is committed, seen from a rank that does not commit.

        `waiting` is called meanwhile. Raises RuntimeError: it never will be. TimeoutError.
        """
        name = self._checked_name(name)
        end = time.monotonic() + timeout_s
        pause = 0.002
        while self._strategy.identity(name) != uuid:
            # the identity again: it may have been committed between the two looks
            if not self._strategy.exists(name, uuid) and self._strategy.identity(name) != uuid:
                raise RuntimeError(
                    f"{self.url}{name}: the attempt {uuid} was given up; rank 0 tells why"
                )
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self.url}{name}: not committed after {timeout_s} s; rank 0 tells why"
                )
            waiting()
            time.sleep(pause)
            pause = min(2 * pause, 0.25)

    # Finding

    def steps(self) -> list[int]:
        """Every committed step, ascending. None of them is verified."""
        matches = map(_STEP.fullmatch, self._strategy.names())
        return sorted(int(match[1]) for match in matches if match)

    def open(self, name: int | str) -> CheckpointDir:
        """The checkpoint of a step or name. ValueError: there is none."""
        directory = self._strategy.open(self._checked_name(name))
        if directory is None:
            steps = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(
                f"{self.url} has no checkpoint {self._checked_name(name)}; steps there: {steps}"
            )
        return directory

    def latest(self) -> int | None:
        """The newest step with a valid manifest."""
        for step in reversed(self.steps()):
            if self._has_manifest(step):
                return step
        return None

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

    # Retention

    def tag(self, tag: str, step: int) -> None:
        """Lets `tag` name a step, which retention then keeps."""
        self.open(step)
        self._strategy.prepare("tags")
        self.files.write(f"tags/{self._checked_name(tag)}.json", canonical_json({"step": step}))

    def untag(self, tag: str) -> None:
        """Removes a tag, not the step it names."""
        self.files.remove(f"tags/{self._checked_name(tag)}.json")

    def tags(self) -> dict[str, int]:
        """The tags of this root: name -> number of the step that it protects."""
        tags = {}
        for file in self.files.names("tags"):
            if not file.endswith(".json"):
                continue
            value = parse_json(self.files.read(file), self.url + file)
            if not isinstance(value, dict) or type(value.get("step")) is not int:
                raise ValueError(f'{self.url}{file}: no {{"step": number}}; write the tag again')
            tags[file.removeprefix("tags/").removesuffix(".json")] = value["step"]
        return tags

    def retain(self, keep_last: int = 3, keep_every: int | None = None, **rules: Any) -> list[int]:
        """Removes old steps and returns them: to be called after a commit. Which ones, `surplus` says."""
        removed = self.surplus(keep_last, keep_every, **rules)
        for step in removed:
            self._strategy.remove(step_name(step))
        return removed

    def surplus(self, keep_last: int = 3, keep_every: int | None = None, **rules: Any) -> list[int]:
        """The steps that need not be kept by `Retention(keep_last=..., keep_every=..., **rules)`.

        Kept whatever it says: tagged steps, the newest that verifies with everything newer, and what holds a user's
        files, with a warning. Reads `keep_last` manifests, and those of steps that `.retention.json` does not know
        where a rule needs more than numbers.
        """
        retention = Retention(keep_last=keep_last, keep_every=keep_every, **rules)
        steps = self.steps()
        complete = set[int]()
        verified = None
        # from the newest on, until one verifies and `keep_last` are complete
        for step in reversed(steps):
            if verified is None and not self.problems(step, digests=True):
                verified = step
            if self._has_manifest(step):
                complete.add(step)
            if verified is not None and len(complete) >= keep_last:
                break
        if verified is None:
            return []
        facts = self.facts(steps) if retention.reads_facts else {}
        protected = complete | set(self.tags().values()) | retention.protected(steps, facts)
        removable = []
        shared = []
        for step in steps:
            if step < verified and step not in protected:
                foreign_files = self._strategy.foreign_files(step_name(step))
                if foreign_files:
                    shared.append((step, foreign_files[0]))
                else:
                    removable.append(step)
        if shared:
            step, file = shared[0]
            text = "%s keeps %d old steps: %s holds %s, which belongs to no checkpoint; move that"
            log.warning(text, self.url, len(shared), step_name(step), file)
        return removable

    def facts(self, steps: Collection[int]) -> dict[int, StepFacts]:
        """What the manifests of steps say; those without a valid one are left out. Remembered beside the steps."""
        remembered = self._remembered()
        facts = {
            step: step_facts for step, step_facts in (remembered or {}).items() if step in steps
        }
        for step in set(steps) - facts.keys():
            with contextlib.suppress(OSError, ValueError):
                facts[step] = StepFacts.from_run(read_manifest(self.open(step)).run)
        self._remember(facts, remembered)
        return facts

    def _remember(
        self, facts: Mapping[int, StepFacts], before: Mapping[int, StepFacts] | None
    ) -> None:
        """Writes `.retention.json` if it changed; `before`: what it says now, None if it is not ours."""
        if before is not None and facts != before:
            steps = {
                str(step): [step_facts.time, dict(step_facts.metrics)]
                for step, step_facts in facts.items()
            }
            self.files.write(_FACTS, seal({"format": 1, "steps": steps}))

    def _forget(self, name: str) -> None:
        """Before a step is saved again: what was remembered of it is no longer true."""
        if before := self._remembered():
            other_steps = {step: facts for step, facts in before.items() if step_name(step) != name}
            self._remember(other_steps, before)

    def _remembered(self) -> dict[int, StepFacts] | None:
        """None: a file of that name is not ours, so manifests are read each time."""
        try:
            steps = unseal(self.files.read(_FACTS), self.url + _FACTS)["steps"]
            return {int(step): StepFacts(time, metrics) for step, (time, metrics) in steps.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    # After a crash

    def sweep(self, name: int | str | None = None, *, thorough: bool = False) -> list[str]:
        """Removes what killed jobs left, and puts back a checkpoint whose replacement was never finished.

        `name`: in an object store only what belongs to it. `thorough`: there also what the index does not list.
        """
        return self._strategy.sweep(
            self.stale_s, "" if name is None else self._checked_name(name), thorough=thorough
        )

    def leftovers(self, *, thorough: bool = False) -> list[str]:
        """What `sweep` would remove."""
        return self._strategy.leftovers(self.stale_s, thorough=thorough)

    def watch(self) -> None:
        """Returns when a sweep knows what is still being written: in an object store after `stale_s` at most."""
        self._strategy.watch(self.stale_s)

    def wait_for_writers(self, timeout_s: float, poll_s: float = 0.1) -> None:
        """Returns when every temporary is committed or stale.

        A job that was killed may have left a writer that still finishes its save.
        Raises TimeoutError naming those that are neither.
        """
        end = time.monotonic() + timeout_s
        logged = False
        while live := self._live_attempts():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self.url}: after {timeout_s} s still being written: {', '.join(live)}"
                )
            if not logged and time.monotonic() > end - timeout_s + PATIENCE_S:
                text = "%s: waits for a writer that a killed job left, %s; at most %.0f s after its last heartbeat"
                log.warning(text, self.url, live[0], self.stale_s)
                logged = True
            time.sleep(poll_s)
            # of an object store each look is paid for
            poll_s = max(poll_s, min(2 * poll_s, 1.0))

    def _live_attempts(self) -> list[str]:
        ages = self._strategy.ages()
        return [f"{name} ({uuid})" for (name, uuid), age in ages.items() if age < self.stale_s]
