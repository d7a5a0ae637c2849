"""`sign` and `verify --key`: who wrote a checkpoint, for stores that others can write to.

Checksums find damage and no forger, who can make a CRC fit. So an Ed25519 signature is of the SHA-256 of every file,
in `signature.json` beside the manifest. It does not say which step of a run a checkpoint is.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import Any

from core.dist_checkpointing.format.json_files import canonical_json, seal, unseal
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.manifest import MANIFEST, SIGNATURE, SIGNED, read_manifest
from core.dist_checkpointing.storage.checkpoint_dir import CheckpointDir
from core.dist_checkpointing.tools.console import printable

_AT_ONCE = 8 << 20  # bytes


def sign(place: CheckpointDir, key_file: str | os.PathLike[str]) -> int:
    """Signs a whole checkpoint and returns the number of its files. `key_file`: a private key as PEM.

    Raises ValueError: damage, no such key, a file in the way that is no signature.
    """
    key = _key(key_file, "private")
    if problems := check(place, full=True):
        raise ValueError(f"{len(problems)} problems, only a whole checkpoint is signed; {'; '.join(problems[:3])}")
    if place.size(SIGNATURE) is not None:
        _signed(place)
    files = _digests(place)
    place.write(SIGNATURE, seal({"kind": SIGNED, "files": files, "signature": key.sign(_text(files)).hex()}))
    return len(files)


def unsigned(place: CheckpointDir, key_file: str | os.PathLike[str]) -> list[str]:
    """What of a checkpoint is not signed by the owner of a public key, each line naming its file; empty: nothing.

    Raises ValueError: no such key.
    """
    key = _key(key_file, "public")
    if place.size(SIGNATURE) is None:
        return [f"{place.url}{SIGNATURE}: is missing, nothing is signed"]
    from cryptography.exceptions import InvalidSignature

    try:
        files, signature = _signed(place)
        key.verify(signature, _text(files))
        found = _digests(place)
    except InvalidSignature:
        return [f"{place.url}{SIGNATURE}: not signed by the owner of {os.fspath(key_file)}"]
    except (OSError, ValueError) as error:
        return [printable(str(error))]
    wrong = sorted(path for path in files.keys() | found.keys() if files.get(path) != found.get(path))
    return [printable(f"{place.url}{path}: is not the file that was signed") for path in wrong]


def _text(files: dict[str, str]) -> bytes:
    return canonical_json({"kind": SIGNED, "files": files})


def _signed(place: CheckpointDir) -> tuple[dict[str, str], bytes]:
    """Path -> SHA-256, and the signature of that. ValueError naming the file: it is no signature."""
    name = place.url + SIGNATURE
    value = unseal(place.read(SIGNATURE), name)
    files, signature = value.get("files"), value.get("signature")
    try:
        if (
            value.get("kind") == SIGNED
            and isinstance(files, dict)
            and all(isinstance(d, str) for d in files.values())
        ):
            return files, bytes.fromhex(signature or "")
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name}: no signature that this version makes; remove it and sign again")


def _digests(place: CheckpointDir) -> dict[str, str]:
    """Of every file, the manifest's too."""
    sizes = {path: size for path, (size, _) in read_manifest(place).files.items()}

    def digest(path: str) -> str:
        found, size = sha256(), sizes[path]
        for offset in range(0, size, _AT_ONCE):
            found.update(place.read(path, offset, min(_AT_ONCE, size - offset)))
        return found.hexdigest()

    with ThreadPoolExecutor(8, thread_name_prefix="checkpoint-sign") as pool:
        files = dict(zip(sizes, pool.map(digest, sizes), strict=True))
    return files | {MANIFEST: sha256(place.read(MANIFEST)).hexdigest()}


def _key(file: str | os.PathLike[str], kind: str) -> Any:
    """An Ed25519 key, private or public, of a PEM file."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError:
        raise ValueError('signatures need the package cryptography: pip install "paracore[sign]"') from None
    read: dict[str, Callable[[bytes], Any]] = {
        "private": partial(load_pem_private_key, password=None),
        "public": load_pem_public_key,
    }
    types = {"private": ed25519.Ed25519PrivateKey, "public": ed25519.Ed25519PublicKey}
    with open(file, "rb") as opened:
        text = opened.read(1 << 16)
    try:
        key = read[kind](text)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        key, why = None, f" ({error})"
    else:
        why = f", a {type(key).__name__}"
    if not isinstance(key, types[kind]):
        raise ValueError(
            f"{os.fspath(file)} is no {kind} Ed25519 key as PEM without a password{why}; make a pair by "
            "`openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem`"
        )
    return key
