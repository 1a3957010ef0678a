"""Secrets by reference, and hidden in reports."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest
from tests.fakes.server import FakeReply, FaultyServer, Request

import spile.fleet
from spile.errors import CloudError, SpecError
from spile.fleet.agent import resolve_secrets
from spile.store.heartbeat import hide_values, secret_values


class _Manager(FaultyServer):
    """Secret Manager: one secret."""

    def answer(self, request: Request) -> FakeReply:
        if request.path != "/v1/projects/p/secrets/hf/versions/latest:access":
            return FakeReply(404, b"{}")
        output = {"payload": {"data": base64.b64encode(b"hf_very_secret\n").decode()}}
        return FakeReply(200, json.dumps(output).encode())


def test_a_reference_is_resolved_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with _Manager() as manager:
        monkeypatch.setenv("SPILE_SECRETS_ENDPOINT", manager.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        wanted = {"HF_TOKEN": "secret:projects/p/secrets/hf", "LEVEL": "3"}
        assert resolve_secrets(wanted) == {"HF_TOKEN": "hf_very_secret", "LEVEL": "3"}
        with pytest.raises(CloudError, match=r"the secret projects/p/secrets/none for HF_TOKEN cannot be read.*404"):
            resolve_secrets({"HF_TOKEN": "secret:projects/p/secrets/none"})
    with pytest.raises(SpecError, match=r"--env HF_TOKEN: expected secret:projects/P/secrets/S"):
        resolve_secrets({"HF_TOKEN": "secret:../etc/passwd"})


def test_secrets_are_hidden_in_reports() -> None:
    environment = {"HF_TOKEN": "hf_very_secret", "MODEL": "secret:projects/p/secrets/m", "LEVEL": "debugging"}
    given = {**environment, "MODEL": "brought-by-reference"}
    hidden = secret_values(environment, given)
    line = "401 for hf_very_secret with brought-by-reference while debugging"
    assert hide_values(line, hidden) == "401 for *** with *** while debugging"


def test_no_secret_stands_in_a_command_line_of_the_startup_script() -> None:
    script = (Path(spile.fleet.__file__).parent / "startup.sh").read_text()
    assert "umask 077" in script
    assert '-H "Authorization' not in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
