"""Google Cloud Storage: a server at TENSORSTORE_GCS_HTTP_URL. No registry has one that knows generations of objects
and ranges of names; github.com/googleapis/storage-testbench does, by which Google tests its own clients."""

import json
import os
import urllib.request
from uuid import uuid4

import pytest

from tests.dist_checkpointing.remote import RUN, run

SERVER = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SERVER, reason="TENSORSTORE_GCS_HTTP_URL names no server; storage-testbench is one"),
]


def test_a_run():
    bucket = f"bucket-{uuid4().hex}"
    request = urllib.request.Request(
        f"{SERVER}/storage/v1/b?project=test",
        data=json.dumps({"name": bucket}).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()
    here = {"TENSORSTORE_GCS_HTTP_URL": SERVER, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any"}
    status, told = run(here, "-c", RUN, f"gs://{bucket}/run")
    assert status == 0 and "whole\n" in told, told
    status, told = run(here, "-m", "core.dist_checkpointing", "verify", f"gs://{bucket}/run")
    assert status == 0 and "every byte is right" in told, told
    status, told = run(here, "-m", "core.dist_checkpointing", "prune", f"gs://{bucket}/run", "--keep-last", "1")
    assert status == 0 and "removed 0 steps, 1 are kept" in told, told
