"""From the files of all ranks to one committed checkpoint. Receipts replace a barrier, so no process group is needed.

Every rank: `write_receipt` behind its last file, or `write_failure`; then `merge_receipts`. One process: `commit`.
Beyond 64 ranks the first of each 64 merges their receipts into one, and whoever commits reads those.
"""

import time
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

from core.dist_checkpointing.format.digest import json_crc
from core.dist_checkpointing.format.json_files import canonical_json, parse_json
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import Files, Manifest, is_entry, planned_files
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir

__all__ = [
    "commit",
    "merge_receipts",
    "planned_files",
    "receipts_folder",
    "write_failure",
    "write_receipt",
]

FOLDER = "receipts"
FAN_IN = 64  # receipts that one rank merges


def _receipt(rank: int, folder: str = FOLDER) -> str:
    return f"{folder}/{rank:05d}.json"


def receipts_folder(uuid: str, rank: int, world_size: int) -> str:
    """Where a rank's receipt goes: into the checkpoint or, to be merged, beside those of the ranks around it.

    A name without `uuid` might be that of an array.
    """
    if world_size <= FAN_IN:
        return FOLDER
    first_of_group = rank - rank % FAN_IN
    return f"{uuid}.{FOLDER}/{first_of_group:05d}"


def write_receipt(directory: CheckpointDir, rank: int, files: Files, folder: str = FOLDER) -> None:
    """Says that this rank is done: all it wrote, durably, as path -> (size, crc)."""
    entries = {path: list(entry) for path, entry in files.items()}
    if folder != FOLDER:
        directory.make_folder(folder)
    directory.write(_receipt(rank, folder), canonical_json({"rank": rank, "files": entries}))


def write_failure(directory: CheckpointDir, rank: int, error: str) -> None:
    """Says that this rank will never be done: the committer need not wait."""
    directory.write(f"{FOLDER}/{rank:05d}.failed", error.encode())


def merge_receipts(
    root: CheckpointRoot,
    name: int | str,
    uuid: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Makes one receipt of those of 64 ranks, if `rank` is the first of them and there are others.

    Theirs are removed before it is written: the committer finds nothing that is not part of the checkpoint.
    `waiting` is called meanwhile. Raises as `commit`; RuntimeError also if the attempt was given up.
    """
    folder = receipts_folder(uuid, rank, world_size)
    if folder == FOLDER or rank % FAN_IN:
        return
    directory = root.temporary(name, uuid)
    ranks = range(rank, min(rank + FAN_IN, world_size))

    def check_attempt() -> None:
        if not root.is_begun(name, uuid):
            raise RuntimeError(f"{directory.url}: this attempt was given up; rank 0 tells why")
        waiting()

    # the committer would open 16,384 receipts of as many ranks; so it opens 256
    receipts = _wait(directory, folder, ranks, world_size, timeout_s, waiting=check_attempt)
    files = _union(_parsed_receipts(directory, receipts, folder))
    directory.remove_folder(folder)
    write_receipt(directory, rank, files)


def commit(
    root: CheckpointRoot,
    name: int | str,
    uuid: str,
    planned: Set[str],
    *,
    world_size: int,
    run: Mapping[str, Any],
    timeout_s: float,
    waiting: Callable[[], None] = lambda: None,
) -> Manifest:
    """Waits for every rank's receipt and publishes. Never publishes less than `planned`, every file by one rank.

    `waiting` is called meanwhile.
    Raises RuntimeError: a rank failed, or the name was lost to another attempt. TimeoutError naming the silent ranks.
    ValueError: the receipts are not the plan.
    """
    directory = root.temporary(name, uuid)
    merged = world_size > FAN_IN

    def silent_ranks(missing: list[int]) -> list[int]:
        if merged:
            return _silent_in_groups(directory, uuid, missing, world_size)
        return missing

    # 1. every rank's receipt, or the merged one of each 64: all files are durable then
    ranks = range(0, world_size, FAN_IN if merged else 1)
    receipts = _wait(
        directory, FOLDER, ranks, world_size, timeout_s, waiting=waiting, silent_ranks=silent_ranks
    )
    # 2. the files are exactly those of the plan
    files = _union(_parsed_receipts(directory, receipts))
    _check_planned(files, planned, world_size)
    if merged:
        # it is empty: the merging ranks removed what was in it
        directory.remove_folder(f"{uuid}.{FOLDER}")
    for rank, data in receipts.items():
        files[_receipt(rank)] = len(data), json_crc(data)
    # 3. the manifest, and the atomic rename or conditional put after which the checkpoint exists
    manifest = Manifest(uuid, files, run)
    root.publish(name, uuid, manifest.to_bytes(), files)
    return manifest


def _wait(
    directory: CheckpointDir,
    folder: str,
    ranks: Collection[int],
    world_size: int,
    timeout_s: float,
    *,
    waiting: Callable[[], None],
    silent_ranks: Callable[[list[int]], list[int]] = lambda missing: missing,
) -> dict[int, bytes]:
    """Rank -> receipt, of all `ranks`.

    waiting: raises when there is nothing to wait for any more. silent_ranks: whom to name for those whose receipts
    are missing in the end.
    """
    end = time.monotonic() + timeout_s
    pause = 0.002
    while True:
        present = set(directory.names(folder))
        _raise_failures(
            directory, present if folder == FOLDER else directory.names(FOLDER), world_size
        )
        missing = [rank for rank in ranks if _receipt(rank, folder) not in present]
        if not missing:
            return {rank: directory.read(_receipt(rank, folder)) for rank in ranks}
        if time.monotonic() > end:
            silent = silent_ranks(missing)
            listed = ", ".join(map(str, silent[:8]))
            if len(silent) > 8:
                listed += ", …"
            raise TimeoutError(
                f"{directory.url} was not saved: after {timeout_s} s no receipt of {len(silent)} of {world_size} "
                f"ranks, {listed}; look at their logs"
            )
        waiting()
        time.sleep(pause)
        # short at first: most ranks are done at about the same time
        pause = min(2 * pause, 0.25)


def _raise_failures(directory: CheckpointDir, names: Collection[str], world_size: int) -> None:
    """Raises RuntimeError: a rank has written a failure."""
    failed = sorted(name for name in names if name.endswith(".failed"))
    if failed:
        reasons = [
            f"rank {_rank(name)}: {directory.read(name).decode(errors='replace')}"
            for name in failed
        ]
        raise RuntimeError(
            f"{directory.url} was not saved, {len(failed)} of {world_size} ranks failed: {'; '.join(reasons)}"
        )


def _silent_in_groups(
    directory: CheckpointDir, uuid: str, first_ranks: list[int], world_size: int
) -> list[int]:
    """The ranks that whoever merges has no receipt of; if it has all, or merged them already, itself."""
    silent: list[int] = []
    for first in first_ranks:
        folder = receipts_folder(uuid, first, world_size)
        present = set(directory.names(folder))
        ranks = range(first, min(first + FAN_IN, world_size))
        missing = [rank for rank in ranks if _receipt(rank, folder) not in present]
        silent += missing if present and missing else [first]
    return silent


def _rank(name: str) -> int:
    return int(name.removeprefix(f"{FOLDER}/").partition(".")[0])


def _parsed_receipts(
    directory: CheckpointDir, receipts: Mapping[int, bytes], folder: str = FOLDER
) -> dict[int, Any]:
    return {
        rank: parse_json(data, directory.url + _receipt(rank, folder))
        for rank, data in receipts.items()
    }


def _union(receipts: Mapping[int, Any]) -> dict[str, tuple[int, int]]:
    """The files that all these ranks wrote. ValueError: a file twice, or no receipt."""
    files: dict[str, tuple[int, int]] = {}
    owner: dict[str, int] = {}
    problems = []
    for rank, receipt in receipts.items():
        if (
            not isinstance(receipt, dict)
            or receipt.get("rank") != rank
            or not isinstance(receipt.get("files"), dict)
        ):
            raise ValueError(f"{_receipt(rank)} is no receipt of rank {rank}: save again")
        for path, entry in receipt["files"].items():
            if not is_entry(entry):
                raise ValueError(
                    f"{_receipt(rank)}: {entry!r} of {path} is no [size, crc]: save again"
                )
            if path in owner:
                problems.append(f"{path} was written by rank {owner[path]} and by rank {rank}")
            files[path], owner[path] = (entry[0], entry[1]), rank
    _refuse_problems(problems, len(receipts))
    return files


def _check_planned(files: Files, planned: Set[str], world_size: int) -> None:
    """ValueError: they are not every planned file."""
    problems = []
    for kind, paths in (
        ("missing", planned - files.keys()),
        ("unexpected", files.keys() - planned),
    ):
        if paths:
            problems.append(
                f"{len(paths)} of {len(planned)} files are {kind}, the first is {min(paths)}"
            )
    _refuse_problems(problems, world_size)


def _refuse_problems(problems: list[str], count: int) -> None:
    if problems:
        details = "; ".join(problems[:8])
        raise ValueError(
            f"the receipts of {count} ranks are not the plan, nothing is saved: {details}"
        )
