"""A model of the hub: only needed files are fetched, and a refusal of the hub is one line with a fix."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spile.errors import Failure, ModelError, SpileError
from spile.models import model_files
from unit.models.toy_hub import COMMIT, FakeHub, fake_hub
from unit.models.toy_models import copy_model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = copy_model(tmp_path / "m")
    for name in ("pytorch_model.bin", "README.md", "consolidated.safetensors"):
        (folder / name).write_bytes(b"not wanted")
    with fake_hub(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def one_line(name: str, revision: str | None = None, kind: type[SpileError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        model_files.find(name, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_of_the_hub(hub: FakeHub) -> None:
    files = model_files.find("me/tiny")
    assert files.revision == COMMIT
    assert files.weights_hash() == model_files.find("embedded").weights_hash()
    assert files.tokenizer_hash() == model_files.find("embedded").tokenizer_hash()
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_the_cache_serves_when_the_hub_is_gone(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_files.find("me/tiny")
    monkeypatch.setenv("HF_ENDPOINT", closed())
    again = model_files.find("me/tiny")
    assert (again.revision, again.config) == (first.revision, first.config)
    assert again.weights_hash() == first.weights_hash()


def test_the_token_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    model_files.find("me/tiny")
    assert set(hub.tokens) == {"Bearer hf_secret"}


def test_no_such_revision(hub: FakeHub) -> None:
    assert one_line("me/tiny", "v9") == "me/tiny has no such revision: found 'v9'. Name a branch, tag or commit of it."


def test_no_such_model(hub: FakeHub) -> None:
    line = one_line("me/other")
    assert line.startswith(
        "no such model: me/other: expected a folder here, or a public name on the hub, found neither"
    )
    assert line.endswith("set HF_TOKEN to your token.")


def test_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refuse = (403, "GatedRepo")
    assert one_line("me/tiny") == (
        "me/tiny is gated on the hub. Ask for access at huggingface.co/me/tiny and set HF_TOKEN to your token."
    )
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    line = one_line("me/tiny")
    assert line.endswith("HF_TOKEN holds a token without access; ask for access at huggingface.co/me/tiny.")
    assert "hf_secret" not in line


def test_a_bad_token(hub: FakeHub) -> None:
    hub.refuse = (401, "")
    assert "HF_TOKEN" in one_line("me/tiny")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_is_out_is_tried_again_and_is_no_mistake_of_the_user(
    hub: FakeHub, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.3")
    hub.refuse = (status, "")
    line = one_line("me/tiny", kind=Failure)
    assert "the hub does not give a model of that name" in line
    assert str(status) in line
    assert Failure.exit_code == 1
    assert len(hub.asked) > 1
    assert "trying for 0 s" in caplog.text


def test_a_hub_that_comes_back_serves_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "30")
    hub.refuse = (503, "")
    threading.Timer(0.5, lambda: setattr(hub, "refuse", None)).start()
    assert model_files.find("me/tiny").revision == COMMIT


def test_no_network_is_a_failure_and_not_a_mistake(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed())
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.3")
    line = one_line("me/tiny", kind=Failure)
    assert line.startswith("no folder me/tiny here, and the hub does not give a model of that name")
    assert line.endswith("Check the name and the network, or try again later.")


def test_a_look_at_the_config_fetches_no_weights(hub: FakeHub) -> None:
    files = model_files.find("me/tiny", weights=False)
    assert files.config == model_files.find("embedded").config
    assert not [path for path in hub.asked if path.endswith("model.safetensors")]


def test_a_model_with_only_pickles(hub: FakeHub) -> None:
    del hub.files["model.safetensors"]
    assert "me/tiny has no weights: expected model.safetensors" in one_line("me/tiny")


def closed() -> str:
    """An address at which nothing answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
