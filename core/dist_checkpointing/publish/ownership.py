"""What is proven to be ours, among files that a user may have put anywhere: only that is ever replaced or removed.

A checkpoint proves its files by its manifest or, where that is damaged, by its receipts. What is no checkpoint yet,
or no more, holds a file whose name has 32 random digits: `UUID.heartbeat` in a temporary, `UUID.trash` in trash. A
temporary whose heartbeat was taken away, just before its rename, is known by its manifest.
"""

import os
import re

from core.dist_checkpointing.format.json_files import parse_json, unseal
from core.dist_checkpointing.publish.manifest import MANIFEST, SIGNATURE, SIGNED, read_manifest
from core.dist_checkpointing.storage.checkpoint_dir import PosixCheckpointDir

_LOCK = b'{"host":'  # how `Lock` begins what it writes
_MARK = re.compile(r"[0-9a-f]{32}\.(heartbeat|trash)")
_RECEIPT = re.compile(r"\d{5,}\.json")
# files that appear in a checkpoint late: of a rank that fails after the commit, of NFS for a file that is still open
_LATE = re.compile(r"receipts/\d{5,}\.failed(\.part)?|(.*/)?\.nfs[0-9a-f]+")


def listed_files(directory: PosixCheckpointDir) -> set[str] | None:
    """Every file that a checkpoint says it is made of. None: there is no checkpoint, or none that can be read."""
    try:
        return {MANIFEST, *read_manifest(directory).files, *_signature(directory)}
    except (OSError, ValueError):
        pass
    # a damaged manifest: the ranks' receipts list the same files
    files = set()
    try:
        for name in filter(_RECEIPT.fullmatch, directory.fs.listdir(directory.url + "receipts")):
            receipt = parse_json(directory.read(f"receipts/{name}"), name)
            if f"{receipt['rank']:05d}.json" == name:
                files |= {MANIFEST, f"receipts/{name}", *receipt["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files or None


def _signature(directory: PosixCheckpointDir) -> set[str]:
    try:
        is_ours = unseal(directory.read(SIGNATURE), SIGNATURE).get("kind") == SIGNED
    except (OSError, ValueError):
        is_ours = False
    if is_ours:
        return {SIGNATURE}
    return set()


def foreign_files(directory: PosixCheckpointDir) -> list[str]:
    """Files, links and directories below that no checkpoint there lists; without a checkpoint, all entries."""
    files = listed_files(directory)
    if files is None:
        # and no deeper: it may be somebody's home
        return directory.fs.listdir(directory.path)
    # folders of listed files belong to the checkpoint, too
    folders = {"receipts"}
    for path in files:
        while path := os.path.dirname(path):
            folders.add(path)
    entries = directory.fs.entries(directory.path)
    return [
        entry
        for entry in entries
        if entry not in files and entry not in folders and not _LATE.fullmatch(entry)
    ]


def is_remains(directory: PosixCheckpointDir) -> bool:
    """Whether a temporary, or trash, is one of ours: it holds a mark, or nothing but a checkpoint."""
    if os.path.islink(directory.path) or not os.path.isdir(directory.path):
        return False
    try:
        return any(map(_MARK.fullmatch, directory.fs.listdir(directory.path))) or not foreign_files(
            directory
        )
    except OSError:  # another user's
        return False


def is_lock(data: bytes) -> bool:
    """Whether a file is a lock of ours; its end, or all of it, may be lost with the power."""
    return not data or data.startswith(_LOCK)
