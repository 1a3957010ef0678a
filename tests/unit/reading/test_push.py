"""A dataset goes to the hub and comes back: through the client of Hugging Face, to a server on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.fakes.hub import DatasetHub

import spile
from spile.cli.export import push
from spile.errors import Damaged, SpecError, StoreError, UserError
from spile.objects import open_folder
from spile.objects.hub import HubFolder
from spile.reading import push as pushing
from spile.reading.push import push_dataset
from spile.store.cleanup import clear_stream
from spile.store.writer import read_stream, stream_bytes
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
    assert done.files == len(hub.paths()) - 1  # without .gitattributes, which the hub creates
    assert not done.left_out
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

    def damaged(self: DatasetHub, body: bytes) -> object:
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
    with pytest.raises(UserError, match=r"was created with architecture none, .*Push to another repository"):
        spile.push(tmp_path / "other", TARGET)
    hub.token = "another"
    with pytest.raises(UserError, match="HF_TOKEN"):
        spile.push(root, TARGET)


def _held(hub: DatasetHub) -> dict[str, bytes]:
    return {path.relative_to(hub.folder).as_posix(): path.read_bytes() for path in hub.paths()}


def test_only_the_dataset_is_uploaded(
    hub: DatasetHub, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, secret = Path(root), "do not upload"
    outside = tmp_path / "outside"
    outside.mkdir()
    strays = [".env", "id_rsa", "notes.txt", "tpu_0/.env", "tpu_0/shard_0009-dead.safetensors", "tpu_07/stream.json"]
    strays += ["tpu_0/commits/0001.json.bak", "fleet/a/fleet.json", "spec.json.orig"]
    for name in strays:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(secret)
    (outside / "passwd").write_text(secret)
    (folder / "tpu_0" / "metadata.json").unlink()
    for name, target in {"passwd": "passwd", "tpu_0/metadata.json": "passwd", "tpu_5": ""}.items():
        (folder / name).symlink_to(outside / target)
    local = ["tpu_0/progress.json", "tpu_0/suspects.json", "claims/0000/000001.json", "index/0000.json.z"]
    for name in local:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(secret)
    linked = ["passwd", "tpu_0/metadata.json", "tpu_5/passwd"]
    dataset = spile.open(root)
    assert push(root, TARGET) == 0
    held = _held(hub)
    assert not {name for name, content in held.items() if secret.encode() in content}
    assert set(held) - {".gitattributes", "README.md", "norms.svg"} == {
        info.key for info in dataset.root.list() if not info.linked and info.key not in (*strays, *local)
    }
    printed = "".join(capsys.readouterr()).replace("\n", " ")
    assert f"not uploaded, because not part of the dataset: {len(strays) + len(linked)} files: .env, " in printed
    assert set(spile.push(root, TARGET).left_out) == {*strays, *linked}
    assert spile.verify(TARGET).ok


def test_a_shard_behind_a_link_or_gone_is_refused(hub: DatasetHub, root: str, tmp_path: Path) -> None:
    shard = next((Path(root) / "tpu_3").glob("shard_*"))
    shard.rename(tmp_path / "shard")
    with pytest.raises(Damaged, match=rf"tpu_3/{shard.name} is gone\. See what is left with: spile verify"):
        spile.push(root, TARGET)
    shard.symlink_to(tmp_path / "shard")
    with pytest.raises(UserError, match=rf"tpu_3/{shard.name} cannot be uploaded: a symbolic link .*cp -rL"):
        spile.push(root, TARGET)
    assert not hub.messages


def test_commits_after_the_dataset_was_opened_are_left_out(hub: DatasetHub, root: str) -> None:
    dataset = spile.open(root)
    stream = dataset.streams[0]
    stream._commits = stream.commits[:-1]  # as it was before the last commit
    spile.push(dataset, TARGET)
    assert len(spile.open(TARGET).streams[0].commits) == len(stream.commits)
    assert not [problem for problem in spile.verify(TARGET).all_problems if problem.kind == "damaged"]
    spile.push(root, TARGET)
    assert spile.verify(TARGET).ok
    assert hub.messages[-1] == "Add the ledger and the card"


@pytest.mark.parametrize("change", ["other data", "fewer streams", "other taps"])
def test_another_dataset_of_the_same_run_is_refused(hub: DatasetHub, root: str, tmp_path: Path, change: str) -> None:
    spile.push(root, TARGET)
    before, other = _held(hub), open_folder(str(tmp_path / "other"))
    if change == "fewer streams":
        produce(other, 40)
    else:
        for number, samples in {0: 40, 3: 9}.items():
            produce(other, samples, worker_id=number)
            record = read_stream(other.child(f"tpu_{number}"))
            assert record is not None
            fields = {"sha256": "f" * 64} if change == "other data" else {"taps": record.identity.taps[:1]}
            changed = replace(record, identity=replace(record.identity, **fields))
            other.put(f"tpu_{number}/stream.json", stream_bytes(changed))
    why = {
        "other data": r"rows/tpu_0 was created with data of sha256 \w+…, but this command asks for data of sha256 fff",
        "fewer streams": r"holds stream 3, which .*other does not have\. Push all streams",
        "other taps": r"rows/tpu_0 was created with taps residual\.0, attn\.1, .*asks for taps residual\.0\.",
    }
    with pytest.raises(UserError, match=why[change]):
        spile.push(other.url, TARGET)
    assert _held(hub) == before
    assert spile.verify(TARGET).ok


def test_a_stream_that_was_started_again_replaces_the_earlier_one_in_one_commit(
    hub: DatasetHub, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "_FILES", 1)
    spile.push(root, TARGET)
    first = set(_held(hub))
    folder = open_folder(root)
    clear_stream(folder, 0)
    produce(folder, 40, attempt="zzzz")
    (hub.folder / "notes.md").write_text("mine")
    spile.push(root, TARGET)
    assert set(_held(hub)) & first >= {"run.json", "README.md", "tpu_3/stream.json"}
    assert set(_held(hub)) >= {info.key for info in folder.list() if "progress" not in info.key} | {"notes.md"}
    assert not {name for name in _held(hub) if name.startswith("tpu_0/shard") and "zzzz" not in name}
    ids = set()
    for commit in [*list(hub.history)[-4:], hub.commit]:
        at = f"{TARGET}@{commit}"
        assert spile.verify(at).ok, "each commit holds one whole dataset"
        ids.add(spile.open(at).streams[0].record.id)
    assert len(ids) == 2


def test_a_push_that_another_one_overtakes_is_refused(
    hub: DatasetHub, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, others = DatasetHub._commit, []

    def overtaken(self: DatasetHub, body: bytes) -> object:
        if b"the ledger" in body and not others:
            others.append(whole(self, b'{"key": "header", "value": {"summary": "another push"}}\n'))
        return whole(self, body)

    monkeypatch.setattr(DatasetHub, "_commit", overtaken)
    with pytest.raises(StoreError, match=r"412 A commit has happened since.*Run the command again"):
        spile.push(root, TARGET)
    assert "run.json" not in _held(hub)
    spile.push(root, TARGET)
    assert spile.verify(TARGET).ok


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
