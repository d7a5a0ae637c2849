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

_BLOCK_BYTES = 8 << 20  # read and hashed at a time


def sign(directory: CheckpointDir, key_file: str | os.PathLike[str]) -> int:
    """Signs a complete checkpoint and returns the number of its files. `key_file`: a private key as PEM.

    Raises ValueError: damage, no such key, a file in the way that is no signature.
    """
    key = _read_key(key_file, "private")
    # a signature vouches for every byte, so every byte is read first
    if problems := check(directory, full=True):
        raise ValueError(
            f"{len(problems)} problems, only a whole checkpoint is signed; {'; '.join(problems[:3])}"
        )
    if directory.size(SIGNATURE) is not None:
        # raises: only a signature of ours is replaced
        _read_signature(directory)
    files = _digests(directory)
    signature = key.sign(_signed_text(files)).hex()
    directory.write(SIGNATURE, seal({"kind": SIGNED, "files": files, "signature": signature}))
    return len(files)


def unsigned(directory: CheckpointDir, key_file: str | os.PathLike[str]) -> list[str]:
    """What of a checkpoint is not signed by the owner of a public key, each line naming its file; empty: nothing.

    Raises ValueError: no such key.
    """
    key = _read_key(key_file, "public")
    if directory.size(SIGNATURE) is None:
        return [f"{directory.url}{SIGNATURE}: is missing, nothing is signed"]
    from cryptography.exceptions import InvalidSignature

    try:
        signed_digests, signature = _read_signature(directory)
        key.verify(signature, _signed_text(signed_digests))
        digests = _digests(directory)
    except InvalidSignature:
        return [f"{directory.url}{SIGNATURE}: not signed by the owner of {os.fspath(key_file)}"]
    except (OSError, ValueError) as error:
        return [printable(str(error))]
    all_paths = sorted(signed_digests.keys() | digests.keys())
    unequal = [path for path in all_paths if signed_digests.get(path) != digests.get(path)]
    return [
        printable(f"{directory.url}{path}: is not the file that was signed") for path in unequal
    ]


def _signed_text(digests: dict[str, str]) -> bytes:
    return canonical_json({"kind": SIGNED, "files": digests})


def _read_signature(directory: CheckpointDir) -> tuple[dict[str, str], bytes]:
    """(path -> SHA-256, the signature of that). ValueError naming the file: it is no signature."""
    file = directory.url + SIGNATURE
    value = unseal(directory.read(SIGNATURE), file)
    digests = value.get("files")
    signature = value.get("signature")
    try:
        if value.get("kind") == SIGNED and isinstance(digests, dict) and _are_texts(digests):
            return digests, bytes.fromhex(signature or "")
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{file}: no signature that this version makes; remove it and sign again")


def _are_texts(digests: dict[Any, Any]) -> bool:
    return all(isinstance(digest, str) for digest in digests.values())


def _digests(directory: CheckpointDir) -> dict[str, str]:
    """Path -> SHA-256 of every file, the manifest included."""
    sizes = {path: size for path, (size, _) in read_manifest(directory).files.items()}

    def digest(path: str) -> str:
        # in blocks: a file may be larger than memory
        hasher = sha256()
        size = sizes[path]
        for offset in range(0, size, _BLOCK_BYTES):
            hasher.update(directory.read(path, offset, min(_BLOCK_BYTES, size - offset)))
        return hasher.hexdigest()

    with ThreadPoolExecutor(8, thread_name_prefix="checkpoint-sign") as pool:
        digests = dict(zip(sizes, pool.map(digest, sizes), strict=True))
    return digests | {MANIFEST: sha256(directory.read(MANIFEST)).hexdigest()}


def _read_key(file: str | os.PathLike[str], kind: str) -> Any:
    """An Ed25519 key, private or public, of a PEM file."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import (
            load_pem_private_key,
            load_pem_public_key,
        )
    except ImportError:
        raise ValueError(
            "signatures need the package cryptography: pip install cryptography"
        ) from None
    loaders: dict[str, Callable[[bytes], Any]] = {
        "private": partial(load_pem_private_key, password=None),
        "public": load_pem_public_key,
    }
    types = {"private": ed25519.Ed25519PrivateKey, "public": ed25519.Ed25519PublicKey}
    with open(file, "rb") as key_file:
        pem = key_file.read(1 << 16)
    try:
        key = loaders[kind](pem)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        key = None
        details = f" ({error})"
    else:
        details = f", a {type(key).__name__}"
    if not isinstance(key, types[kind]):
        raise ValueError(
            f"{os.fspath(file)} is no {kind} Ed25519 key as PEM without a password{details}; make a pair by "
            "`openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out public.pem`"
        )
    return key
