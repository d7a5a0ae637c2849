"""What is proven to be ours, among files that a user may have put anywhere: only that is ever replaced or removed.

A checkpoint proves its files by its manifest or, where that is damaged, by its receipts. What is no checkpoint yet,
or no more, holds a file whose name has 32 random digits: `UUID.heartbeat` in a temporary, `UUID.trash` in trash.
"""

import os
import re

from core.dist_checkpointing.format.json_files import parse_json, unseal
from core.dist_checkpointing.publish.manifest import MANIFEST, SIGNATURE, SIGNED, read_manifest
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir

_LOCK = b'{"host":'  # how `Lock` begins what it writes
_MARK = re.compile(r"[0-9a-f]{32}\.(heartbeat|trash)")
_RECEIPT = re.compile(r"\d{5,}\.json")
_LATE = re.compile(r"receipts/\d{5,}\.failed(\.part)?|(.*/)?\.nfs[0-9a-f]+")  # of a slow rank; of a file that is open


def listed(place: PosixCheckpointDir) -> set[str] | None:
    """Every file that a checkpoint says it is made of. None: there is no checkpoint, or none that can be told."""
    try:
        return {MANIFEST, *read_manifest(place).files, *_signature(place)}
    except (OSError, ValueError):
        pass
    files = set()
    try:
        for name in filter(_RECEIPT.fullmatch, place.fs.listdir(place.url + "receipts")):
            receipt = parse_json(place.read(f"receipts/{name}"), name)
            if f"{receipt['rank']:05d}.json" == name:
                files |= {MANIFEST, f"receipts/{name}", *receipt["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files or None


def _signature(place: PosixCheckpointDir) -> set[str]:
    try:
        ours = unseal(place.read(SIGNATURE), SIGNATURE).get("kind") == SIGNED
    except (OSError, ValueError):
        ours = False
    return {SIGNATURE} if ours else set()


def strangers(place: PosixCheckpointDir) -> list[str]:
    """Files, links and directories below that no checkpoint there lists; without a checkpoint, what is in it."""
    files = listed(place)
    if files is None:
        return place.fs.listdir(place.path)  # and no deeper: it may be somebody's home
    folders = {"receipts"}
    for path in files:
        while path := os.path.dirname(path):
            folders.add(path)
    found = place.fs.entries(place.path)
    return [path for path in found if path not in files and path not in folders and not _LATE.fullmatch(path)]


def is_remains(place: PosixCheckpointDir) -> bool:
    """Whether a temporary, or trash, is one of ours: it holds a mark, or nothing but a checkpoint."""
    if os.path.islink(place.path) or not os.path.isdir(place.path):
        return False
    try:
        return any(map(_MARK.fullmatch, place.fs.listdir(place.path))) or not strangers(place)
    except OSError:  # another user's
        return False


def is_lock(data: bytes) -> bool:
    """Whether a file is a lock of ours; its end, or all of it, may be lost with the power."""
    return not data or data.startswith(_LOCK)
