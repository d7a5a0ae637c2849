"""The peers of the benchmark of experts are optional."""

import importlib.util

from benchmarks import experts_peers


def test_of_each_missing_peer_one_line_says_how_to_install_it(monkeypatch):
    said = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert experts_peers.installed(said.append) == []
    assert len(said) == 2
    assert "pip install --no-deps megatron-core==0.16.1" in said[0]
    assert "pip install deepspeed==0.19.8" in said[1]
