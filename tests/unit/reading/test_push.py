"""A dataset goes to the hub and comes back: through the client of Hugging Face, to a server on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import spile
from spile.errors import SpecError, StoreError, UserError
from spile.objects import open_folder
from spile.objects.hub import HubFolder
from spile.reading import push as pushing
from spile.reading.push import push_dataset
from spile_fakes.hub import DatasetHub
from world import produce

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # within the hub's client
TARGET = "hf://datasets/someone/rows"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    from huggingface_hub import constants

    (tmp_path / "hub").mkdir()
    with DatasetHub(tmp_path / "hub") as served:
        for name, value in served.environment(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # The server has the older protocol for uploads.
        monkeypatch.setenv("HF_TOKEN", "secret")
        yield served


@pytest.fixture
def root(tmp_path: Path) -> str:
    produce(open_folder(str(tmp_path / "root")), 40)
    produce(open_folder(str(tmp_path / "root")), 9, worker_id=3)
    return str(tmp_path / "root")


def test_a_dataset_is_pushed_and_read_in_ranges(hub: DatasetHub, root: str) -> None:
    done = spile.push(root, TARGET, private=True)
    assert hub.private
    there, here = spile.open(TARGET), spile.open(root)
    assert len(there) == len(here) == 45
    assert [sample.task_id for sample in there] == [sample.task_id for sample in here]
    assert np.array_equal(there.numpy("residual.1"), here.numpy("residual.1"))
    assert spile.verify(TARGET).ok
    assert done.files == len(hub.paths())
    assert done.commit == hub.commit
    before = hub.bytes_sent
    row = spile.open(f"{TARGET}@{hub.commit}").sample(3, 2)["residual.0"]
    assert row.shape[1] == 8
    assert hub.bytes_sent - before < 200_000  # neither shard was read whole


def test_the_card_says_what_it_is(hub: DatasetHub, tmp_path: Path) -> None:
    from huggingface_hub import DatasetCard

    texts = [{"text": "The cat sat", "id": "|<script>"}, {"text": "on the mat", "id": "b"}]
    spile.extract("embedded", texts, tmp_path / "root", taps=["residual.0-2"], statistics=True)
    spile.push(tmp_path / "root", TARGET)
    text = (hub.folder / "README.md").read_text()
    assert DatasetCard(text).data.tags == ["spile", "activations", "interpretability"]
    assert f'spile.open("{TARGET}")' in text
    assert "| samples | 2 |" in text
    middle = spile.open(TARGET).stats("residual.1").norm_quantile(0.5)
    assert f"| residual.1 | 9 | {middle:.4g} |" in text
    drawn = ElementTree.fromstring((hub.folder / "norms.svg").read_bytes())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert "residual.2" in {each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")}


def test_a_push_that_failed_continues(hub: DatasetHub, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "_FILES", 1)
    hub.refuse = 1
    with pytest.raises(StoreError, match=r"400 no more\. Run the command again"):
        spile.push(root, TARGET)
    with pytest.raises(UserError, match="no dataset"):
        spile.open(TARGET)  # Half a dataset is none.
    hub.refuse = None
    hub.requests.clear()
    spile.push(root, TARGET)
    sent = [each for each in hub.requests if each.startswith("PUT /upload/")]
    assert len(sent) == len(hub.objects) - 1
    assert spile.verify(TARGET).ok
    messages = list(hub.messages)
    spile.push(root, TARGET)
    assert hub.messages == messages, "nothing is committed twice"


def test_content_that_arrives_changed_is_found(hub: DatasetHub, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DatasetHub._commit

    def damaged(self: DatasetHub, body: bytes) -> str:
        found = whole(self, body)
        for name in self.large:
            self.large[name] = "0" * 64
        return found

    monkeypatch.setattr(DatasetHub, "_commit", damaged)
    with pytest.raises(StoreError, match="lists other content for tpu_0/shard"):
        spile.push(root, TARGET)


def test_another_run_and_a_wrong_token_are_refused(hub: DatasetHub, root: str, tmp_path: Path) -> None:
    spile.push(root, TARGET)
    spile.extract("embedded", ["one text"], tmp_path / "other", taps=["residual.0"])
    with pytest.raises(UserError, match="holds another run"):
        spile.push(tmp_path / "other", TARGET)
    hub.token = "another"
    with pytest.raises(UserError, match="HF_TOKEN"):
        spile.push(root, TARGET)


@pytest.mark.parametrize("url", ["hf://datasets/rows", "hf://someone/rows", "hf://datasets/a/b/../c", "hf://datasets/"])
def test_a_wrong_address_is_refused(url: str, root: str) -> None:
    with pytest.raises(SpecError):
        push_dataset(spile.open(root), url, {})


@pytest.mark.usefixtures("hub")
def test_a_dataset_of_the_hub_cannot_be_written_to() -> None:
    with pytest.raises(UserError, match="spile push"):
        spile.extract("embedded", ["one text"], TARGET, taps=["residual.0"])


def test_names_have_an_owner_and_may_have_a_revision() -> None:
    assert HubFolder.parse("hf://datasets/a/b@v1/part/") == HubFolder("a/b", "v1", "part")
    assert HubFolder.parse("hf://datasets/a/b@v1/part/").url == "hf://datasets/a/b@v1/part"
