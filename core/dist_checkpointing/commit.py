"""From the files of all ranks to one committed checkpoint. Receipts replace a barrier, so no process group is needed.

Every rank: `write_receipt` behind its last file, or `write_failure`. One process: `commit`.
"""

import time
from collections.abc import Callable, Mapping, Set
from typing import Any

from core.dist_checkpointing.digest import json_crc
from core.dist_checkpointing.json_files import canonical_json, parse_json
from core.dist_checkpointing.manifest import Files, Manifest, is_entry, planned_files
from core.dist_checkpointing.place import Place
from core.dist_checkpointing.root import Root

__all__ = ["commit", "planned_files", "write_failure", "write_receipt"]


def _receipt(rank: int) -> str:
    return f"receipts/{rank:05d}.json"


def write_receipt(place: Place, rank: int, files: Files) -> None:
    """Says that this rank is done: all it wrote, durably, as path -> (size, crc)."""
    place.write(_receipt(rank), canonical_json({"rank": rank, "files": {p: list(e) for p, e in files.items()}}))


def write_failure(place: Place, rank: int, error: str) -> None:
    """Says that this rank will never be done: the committer need not wait."""
    place.write(f"receipts/{rank:05d}.failed", error.encode())


def commit(
    root: Root,
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
    place = root.temporary(name, uuid)
    receipts = _wait(place, world_size, timeout_s, waiting)
    parsed = {rank: parse_json(data, place.url + _receipt(rank)) for rank, data in receipts.items()}
    files = _union(parsed, planned)
    files |= {_receipt(rank): (len(data), json_crc(data)) for rank, data in receipts.items()}
    manifest = Manifest(uuid, files, run)
    root.publish(name, uuid, manifest.to_bytes(), files)
    return manifest


def _wait(place: Place, world_size: int, timeout_s: float, waiting: Callable[[], None]) -> dict[int, bytes]:
    """Rank -> receipt, all of them."""
    end, pause = time.monotonic() + timeout_s, 0.002
    while True:
        present = set(place.names("receipts"))
        failed = sorted(name for name in present if name.endswith(".failed"))
        if failed:
            reasons = "; ".join(f"rank {_rank(name)}: {place.read(name).decode(errors='replace')}" for name in failed)
            raise RuntimeError(f"{place.url} was not saved, {len(failed)} of {world_size} ranks failed: {reasons}")
        missing = [rank for rank in range(world_size) if _receipt(rank) not in present]
        if not missing:
            return {rank: place.read(_receipt(rank)) for rank in range(world_size)}
        if time.monotonic() > end:
            raise TimeoutError(
                f"{place.url} was not saved: after {timeout_s} s no receipt of {len(missing)} of {world_size} ranks, "
                f"{', '.join(map(str, missing[:8]))}{', …' if len(missing) > 8 else ''}; look at their logs"
            )
        waiting()
        time.sleep(pause)
        pause = min(2 * pause, 0.25)


def _rank(name: str) -> int:
    return int(name.removeprefix("receipts/").partition(".")[0])


def _union(receipts: Mapping[int, Any], planned: Set[str]) -> dict[str, tuple[int, int]]:
    """What all ranks wrote. ValueError: it is not every planned file once."""
    files: dict[str, tuple[int, int]] = {}
    owner: dict[str, int] = {}
    problems = []
    for rank, receipt in receipts.items():
        if not isinstance(receipt, dict) or receipt.get("rank") != rank or not isinstance(receipt.get("files"), dict):
            raise ValueError(f"{_receipt(rank)} is no receipt of rank {rank}: save again")
        for path, entry in receipt["files"].items():
            if not is_entry(entry):
                raise ValueError(f"{_receipt(rank)}: {entry!r} of {path} is no [size, crc]: save again")
            if path in owner:
                problems.append(f"{path} was written by rank {owner[path]} and by rank {rank}")
            files[path], owner[path] = (entry[0], entry[1]), rank
    for kind, paths in (("missing", planned - files.keys()), ("unexpected", files.keys() - planned)):
        if paths:
            problems.append(f"{len(paths)} of {len(planned)} files are {kind}, the first is {min(paths)}")
    if problems:
        told = "; ".join(problems[:8])
        raise ValueError(f"the receipts of {len(receipts)} ranks are not the plan, nothing is saved: {told}")
    return files
