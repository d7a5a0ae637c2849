"""An S3-compatible store that is none of Amazon's: a real server on this machine, found as other clients find it."""

import datetime
import ipaddress
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from core.dist_checkpointing import CheckpointManager, load, save
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.publish.checkpoint_root import CheckpointRoot
from core.parallel_state import ParallelState
from tests.dist_checkpointing.remote import RUN, run

pytest.importorskip("moto.server")
pytestmark = pytest.mark.full
single = ParallelState.single("cpu")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """moto's, with one bucket; what it was asked. certificate: a file that holds it and its key, for TLS."""

    def __init__(self, log, certificate=None):
        self.port, self.log = free_port(), log
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        tls = ["-c", certificate, "-k", certificate] if certificate else []
        with log.open("w") as told:
            self.process = subprocess.Popen([*command, *tls], stdout=subprocess.DEVNULL, stderr=told)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        self.trust = ssl.create_default_context(cafile=certificate) if tls else None

    def wait(self):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                request = urllib.request.Request(f"{self.url}/bucket", method="PUT")
                urllib.request.urlopen(request, context=self.trust).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def requests(self):
        """But for those of the lock's heartbeat: how many there are depends on the machine."""
        log = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())  # coloured where the server can
        asked = re.findall(r'"(?:GET|HEAD|PUT|POST|DELETE) /[^"]*', log)
        return [one for one in asked if "/.lock" not in one]


@pytest.fixture
def server(tmp_path, monkeypatch):
    found = Server(tmp_path / "moto.log")
    try:
        found.wait()
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", found.url)):
            monkeypatch.setenv(f"AWS_{name}", value)
        yield found
    finally:
        found.process.terminate()
        found.process.wait(30)


@pytest.fixture
def tls_server(tmp_path):
    found = Server(tmp_path / "moto.log", certificate(tmp_path / "server.pem"))
    try:
        found.wait()
        yield found
    finally:
        found.process.terminate()
        found.process.wait(30)


def certificate(path):
    """One that signs itself, for 127.0.0.1, in a file with its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now, day = (
        ec.generate_private_key(ec.SECP256R1()),
        datetime.datetime.now(datetime.UTC),
        datetime.timedelta(1),
    )
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    builder = builder.add_extension(here, False).add_extension(x509.BasicConstraints(True, None), True)
    signed = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.write_bytes(signed + secret)
    return str(path)


def state(value):
    return {"model": {f"w{i}": torch.full((5, 3), float(value + i)) for i in range(40)}, "step": value}


def test_a_run(server, capsys):
    manager = CheckpointManager("s3://bucket/run", ps=single, keep_last=2, keep_best="loss")
    for step in (1, 2, 3, 4):
        manager.save_async(step, state(step), {"loss": 5.0 if step > 1 else 1.0}).wait()
    assert manager.steps() == [1, 3, 4]
    step, found = manager.load_latest(state(0))
    assert step == 4 and torch.equal(found["model"]["w7"], state(4)["model"]["w7"])
    assert manager.url(4).startswith("s3://bucket/run/step-00000004/")
    manager.close()
    assert main(["verify", "s3://bucket/run"]) == 0 and "every byte is right" in capsys.readouterr().out


def test_a_server_behind_tls_by_its_url(tls_server, tmp_path):
    """Endpoint, region and profile stand in the URL: in this process, the writer program and the command line."""
    keys = tmp_path / "credentials"
    keys.write_text("[me]\naws_access_key_id = a\naws_secret_access_key = b\n")
    url = f"s3://bucket/run?endpoint={tls_server.url}&region=eu-west-1&profile=me&conditional_write=true"
    known = {"AWS_SHARED_CREDENTIALS_FILE": str(keys), "AWS_EC2_METADATA_DISABLED": "true"}
    trusting = known | {"TENSORSTORE_CA_BUNDLE": str(tmp_path / "server.pem")}
    status, told = run(trusting, "-c", RUN, url)
    assert status == 0 and "whole\n" in told, told
    tool = ("-m", "core.dist_checkpointing", "verify")
    status, told = run(trusting, *tool, url)
    assert status == 0 and "the newest of 1 steps" in told and "every byte is right" in told, told
    status, told = run(trusting, *tool, url.replace("=me", "=nobody"))
    assert status == 2 and "profile 'nobody' is not found, or not whole, in " in told, told


def test_steps_and_a_save_do_not_list_the_files_of_all_steps(server):
    manager = CheckpointManager("s3://bucket/many", ps=single, keep_last=30)
    for step in range(8):
        manager.save(step, state(step))
    before = len(server.requests())
    assert manager.steps() == list(range(8))
    assert len(server.requests()) - before <= 8 + 3
    before = len(server.requests())
    manager.save(8, state(8))
    lists = re.findall(r"GET /bucket/?\?\S*prefix=([^ &]*)", "\n".join(server.requests()[before:]))
    assert lists and all(re.match("many(/|%2F)([.]index|tags|step-00000008)", one) for one in lists), lists
    manager.close()


def test_requests_of_a_load(server):
    save(state(1), "s3://bucket/one", ps=single)
    files = len(CheckpointRoot("s3://bucket").files.below("one").names())
    before = len(server.requests())
    load(state(0), "s3://bucket/one", ps=single)
    assert 40 < len(server.requests()) - before <= 1.1 * files + 20
