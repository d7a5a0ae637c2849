"""Who wrote a checkpoint: signatures over all of it, by keys that openssl makes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.format.json_files import seal
from core.dist_checkpointing.publish.check import check
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.dist_checkpointing.publish.manifest import SIGNATURE
from core.dist_checkpointing.storage.checkpoint_dir import open_checkpoint_dir
from core.dist_checkpointing.tools.sign import sign, unsigned
from tests.dist_checkpointing.toy import STORES, crc32c, entry, save, store

ROOT = Path(__file__).parents[2]
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")


def pair(folder, name):
    """Paths of a private and a public key."""
    key = ed25519.Ed25519PrivateKey.generate()
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path):
    return pair(tmp_path, "key")


@pytest.mark.parametrize("kind", STORES)
def test_signed(kind, tmp_path, keys):
    private, public = keys
    root = CheckpointRoot(store(kind, tmp_path))
    save(root, 1, 5)
    place = root.open(1)
    assert unsigned(place, public) == [f"{place.url}{SIGNATURE}: is missing, nothing is signed"]
    for _ in range(2):  # again: the same file
        assert sign(place, private) == 1 + len(json.loads(place.read("manifest.json"))["files"])
        assert unsigned(place, public) == [] and check(place, full=True) == []
    (problem,) = unsigned(place, pair(tmp_path, "other")[1])
    assert "signature.json: not signed by the owner of" in problem and "other.pub" in problem
    save(root, 1, 6)  # replaced as a whole, and the signature with it
    assert unsigned(root.open(1), public) == [f"{root.open(1).url}{SIGNATURE}: is missing, nothing is signed"]


def forged(place, name, payload):
    """Another payload with its own checksums, in the manifest too."""
    data = payload + crc32c(payload)
    manifest = json.loads(place.read("manifest.json"))
    del manifest["crc"]
    manifest["files"][name] = list(entry(name, data))
    place.write(name, data)
    place.write("manifest.json", seal(manifest))


def test_a_forger_without_the_key(tmp_path, keys):
    private, public = keys
    save(CheckpointRoot(tmp_path), 1, 5)
    place = open_checkpoint_dir(tmp_path / "step-00000001")
    sign(place, private)
    forged(place, "model/b/c", b"\0\0\x80\x40")
    assert check(place, full=True) == [], "checksums find no forger"
    assert unsigned(place, public) == [
        f"{place.url}manifest.json: is not the file that was signed",
        f"{place.url}model/b/c: is not the file that was signed",
    ]
    text = json.loads(place.read(SIGNATURE))
    for change in ({"files": {}}, {"files": text["files"] | {"x": "0"}}, {"signature": "00" * 64}):
        place.write(SIGNATURE, seal({k: v for k, v in (text | change).items() if k != "crc"}))
        assert "not signed by the owner of" in unsigned(place, public)[0]
    for bad in ({"signature": 3}, {"signature": "xyz"}, {"files": [1]}, {"kind": "x"}):
        place.write(SIGNATURE, seal({k: v for k, v in (text | bad).items() if k != "crc"}))
        assert "no signature that this version makes; remove it and sign again" in unsigned(place, public)[0]
        with pytest.raises(ValueError, match="no signature that this version makes"):
            sign(place, private)


def test_a_payload_that_the_crc_does_not_see(tmp_path, keys):
    """A cell's digest is of its checksums, which a forger can keep: the manifest stays the same, byte for byte."""
    private, public = keys
    save(CheckpointRoot(tmp_path), 1, 5)
    place = open_checkpoint_dir(tmp_path / "step-00000001")
    sign(place, private)
    data = bytearray(place.read("model/a/c.1.0"))
    data[0] ^= 1
    place.write("model/a/c.1.0", bytes(data))
    assert unsigned(place, public) == [f"{place.url}model/a/c.1.0: is not the file that was signed"]


def test_the_commands(tmp_path, keys, capsys):
    private, public = map(str, keys)
    save(CheckpointRoot(tmp_path / "run"), 1, 5)
    at = str(tmp_path / "run" / "step-00000001")
    assert main(["verify", at, "--key", public]) == 1 and "is missing, nothing is signed" in capsys.readouterr().out
    assert main(["sign", str(tmp_path / "run"), "--key", private]) == 0
    assert f"{at}/signature.json: 10 files are signed" in capsys.readouterr().out
    for words in (["verify", at, "--key", public], ["verify", "--fast", at, "--key", public]):
        assert main(words) == 0 and f"signed by {public}" in capsys.readouterr().out
    assert main(["verify", at]) == 0 and "signed" not in capsys.readouterr().out
    assert main(["prune", str(tmp_path / "run"), "--keep-last", "1"]) == 0
    for key in (public, "nowhere.pem", __file__):
        assert main(["sign", at, "--key", key]) == 2
        assert main(["verify", at, "--key", private if key == public else key]) == 2
    assert "is no public Ed25519 key as PEM without a password" in capsys.readouterr().err
    (Path(at) / "model/b/c").write_bytes(b"x")
    assert (
        main(["sign", at, "--key", private]) == 2 and "only a whole checkpoint is signed" in capsys.readouterr().err
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_keys_of_openssl(tmp_path):
    for words in ("genpkey -algorithm ed25519 -out key.pem", "pkey -in key.pem -pubout -out public.pem"):
        subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    save(CheckpointRoot(tmp_path), 1, 5)
    place = open_checkpoint_dir(tmp_path / "step-00000001")
    sign(place, tmp_path / "key.pem")
    assert unsigned(place, tmp_path / "public.pem") == []


def test_without_the_package(tmp_path, keys):
    save(CheckpointRoot(tmp_path), 1, 5)
    code = "import sys; sys.modules['cryptography'] = None; from core.dist_checkpointing.__main__ import main; "
    code += (
        f"print(main(['verify', {str(tmp_path)!r}, '--key', {str(keys[1])!r}]), main(['verify', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2 0" and "pip install cryptography" in done.stderr


def test_a_signed_checkpoint_is_replaced_and_a_users_file_of_that_name_is_not(tmp_path, keys):
    root = CheckpointRoot(tmp_path / "root")
    save(root, 1, 5)
    sign(root.open(1), keys[0])
    save(root, 1, 6)
    assert root.open(1).size(SIGNATURE) is None, "of the one that was replaced"
    root.open(1).write(SIGNATURE, b"my own")
    with pytest.raises(ValueError, match=SIGNATURE):
        save(root, 1, 7)
    assert root.open(1).read(SIGNATURE) == b"my own"
