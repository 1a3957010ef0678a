"""Joining, committing, fencing, clearing: on every backend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spile.errors import Damaged, Fenced, RunMismatch, StoreError
from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from spile.spec.ranges import Ranges
from spile.spec.sample import Skip
from spile.spec.taps import Tap
from spile.store.cleanup import clear_stream, stream_has_commits
from spile.store.layout import (
    commit_key,
    commit_number,
    is_shard,
    shard_name,
    stream_folder,
    stream_number,
)
from spile.store.ledger import FORMAT, Commit, Ledger, ShardRecord, read_commits, read_ledger, seal, unseal
from spile.store.run import join_run, read_run
from spile.store.writer import StreamWriter, join_stream, read_stream
from world import produce, run_identity, sample_of, stream_identity, write_shard


def joined(folder: Folder, attempt: str | None = None, samples: int | None = 100) -> StreamWriter:
    return join_stream(folder, 0, stream_identity(samples), run_identity(), attempt)


def shard(store: StreamWriter, *indices: int) -> ShardRecord:
    samples = [sample_of(index) for index in indices]
    builder = store.begin(samples)
    write_shard(builder, samples)
    return builder.finish()


def skips(*indices: int) -> list[Skip]:
    return [Skip(index, "t", "empty") for index in indices]


def test_names_and_their_inverses() -> None:
    assert shard_name(1, "ab12") == "shard_0001-ab12.safetensors"
    assert shard_name(12345, "ab12", 3) == "shard_12345-ab12-h03.safetensors"
    assert is_shard(shard_name(12345, "ab12", 103))
    assert not is_shard("shard_0001.safetensors")
    assert (commit_key(7), commit_key(10_000)) == ("commits/0007.json", "commits/10000.json")
    assert all(commit_number(commit_key(number)) == number for number in (1, 9, 9999, 10_000, 123_456))
    for stranger in ("commits/1.json", "commits/00001.json", "commits/0000.json", "commits/0001.json~", "0001.json"):
        assert commit_number(stranger) is None
    assert all(stream_number(stream_folder(12, names)) == 12 for names in ("stream", "tpu"))
    assert [stream_number(name) for name in ("tpu_x", "tpu_05", "gpu_1")] == [None, None, None]


def test_what_is_committed_is_what_the_next_worker_finds(folder: Folder) -> None:
    store = joined(folder, "aaaa")
    store.commit([shard(store, 0, 1, 4)], skips(2))
    store.commit([shard(store, 3)], [])
    again = joined(folder)
    assert again.ledger == store.ledger
    assert again.ledger.done.pairs() == [(0, 5)]
    assert (again.ledger.shards, again.ledger.samples, again.ledger.skipped, again.ledger.commits) == (2, 4, 1, 2)
    assert again.ledger.tokens == sum(len(sample_of(index)) for index in (0, 1, 3, 4))
    assert again.ledger.bytes == sum(file.size for file in again.ledger.files)
    assert [file.name[:15] for file in again.ledger.files] == ["shard_0001-aaaa", "shard_0002-aaaa"]
    commit = next(read_commits(folder.child("tpu_0"), store.record.id))
    assert commit.skipped == tuple(skips(2))
    assert again.attempt != store.attempt
    assert again.begin([sample_of(9)]).name.startswith("shard_0003-")


def test_a_commit_record_survives_its_json() -> None:
    record = ShardRecord(
        "shard_0001-abcd.safetensors", 5000, 1, (4096, 0xFFFFFFFF), {"tokens": 7}, Ranges([(0, 3), (5, 6)]), 4, 40
    )
    commit = Commit(3, "att1", "id", (record,), tuple(skips(9)), 10, "a test", "2026-11-15T12:00:00Z", "0")
    assert Commit.from_bytes(commit.to_bytes(), "x") == commit
    with pytest.raises(Damaged, match="counts 5 samples, 0 cut, and lists 4"):
        Commit.from_bytes(_resealed(commit), "x")


def _resealed(commit: Commit) -> bytes:
    fields = json.loads(commit.to_bytes())
    fields.pop("crc32c")
    fields["shards"][0]["count"] = 5
    return seal(fields)


def test_the_loser_of_a_race_is_fenced(folder: Folder) -> None:
    first, second = joined(folder, "first"), joined(folder, "second")
    first.commit([shard(first, 0)], [])
    with pytest.raises(
        Fenced, match=r"another worker owns this stream.*commits/0001.json.*found attempt first"
    ) as caught:
        second.commit([shard(second, 0)], [])
    assert caught.value.exit_code == 3
    assert joined(folder).ledger.done.pairs() == [(0, 1)]
    with pytest.raises(StoreError, match="it is unknown whether the last commit"):
        second.commit([], skips(7))


def test_a_lost_reply_is_no_lost_race(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = joined(folder)
    real = store.folder.create

    def lost(key: str, data: bytes) -> bool:
        real(key, data)
        return False

    monkeypatch.setattr(store.folder, "create", lost)
    store.commit([shard(store, 0)], [])
    assert store.ledger.commits == 1
    store.commit([shard(store, 1)], [])
    assert joined(folder).ledger.done.pairs() == [(0, 2)]


def test_a_sample_is_never_committed_twice(folder: Folder) -> None:
    store = joined(folder)
    store.commit([shard(store, 0, 1)], skips(2))
    for shards, skipped, text in [
        ([(1, 5)], (), "1"),
        ([(5,), (5, 6)], (), "5"),
        ([(5,)], (5,), "5"),
        ([], (2,), "2"),
        ([], (8, 8), "8"),
    ]:
        with pytest.raises(StoreError, match=f"refused to commit samples .* twice.*found {text}$"):
            store.commit([shard(store, *indices) for indices in shards], skips(*skipped))
    assert joined(folder).ledger.commits == 1


def test_the_ledger_notices_doubled_samples() -> None:
    record = ShardRecord("s", 5, 1, (4096, 1), {}, Ranges([(0, 3)]), 3, 40)
    commits = [Commit(1, "a", "i", (record,), (), None), Commit(2, "a", "i", (record,), tuple(skips(2, 9, 9)), 10)]
    ledger = Ledger().plus(commits)
    assert ledger.doubled.pairs() == [(0, 3), (9, 10)]
    assert ledger.end == 10


def test_a_gap_is_damage(folder: Folder) -> None:
    store = joined(folder)
    for number in range(4):
        store.commit([], skips(number))
    folder.child("tpu_0").delete(commit_key(2))
    with pytest.raises(Damaged, match=r"has a gap: expected commits 1 to 4, found none numbered 2\. Restore") as caught:
        joined(folder)
    assert "--overwrite" not in str(caught.value), "no hint offers to remove what is stored"


def read_everything(folder: Folder) -> None:
    read_run(folder)
    joined(folder, samples=12)


@pytest.mark.parametrize("key", ["tpu_0/commits/0001.json", "tpu_0/stream.json", "run.json"])
@pytest.mark.parametrize("how", ["torn", "flipped", "empty", "no object"])
def test_a_garbled_record_is_named(folder: Folder, key: str, how: str) -> None:
    produce(folder, 12)
    data = folder.get(key)
    bad = {
        "torn": data[:-30],
        "flipped": data.replace(b'"format', b'"farmot', 1),
        "empty": b"",
        "no object": seal({"format": FORMAT, "nothing": 0}),
    }[how]
    folder.put(key, bad)
    with pytest.raises(Damaged, match=key):
        read_everything(folder)


@pytest.mark.parametrize("version", [1, 2, 3, 5, None, "4"])
@pytest.mark.parametrize("key", ["tpu_0/commits/0001.json", "tpu_0/stream.json", "run.json"])
def test_a_record_of_another_version_is_refused_by_name(folder: Folder, key: str, version: object) -> None:
    produce(folder, 12)
    fields = unseal(folder.get(key), key)
    folder.put(key, seal({**fields, "format": version}))
    expected = rf"{key} was written by another version of spile: expected format {FORMAT}, found {version!r}\. Read it"
    with pytest.raises(Damaged, match=expected):
        read_everything(folder)


def test_a_commit_under_another_number_is_damage(folder: Folder) -> None:
    store = joined(folder)
    store.commit([], skips(0))
    below = folder.child("tpu_0")
    below.put(commit_key(2), below.get(commit_key(1)))
    with pytest.raises(Damaged, match=r"0002.json holds another commit: expected number 2, found 1"):
        joined(folder)


def test_past_9999_commits_sort_as_numbers(folder: Folder) -> None:
    """Names get one more digit; the ledger is read by number in any order of the listing."""
    store = joined(folder, "long", samples=None)
    below = folder.child("tpu_0")
    numbers = range(1, 10_012) if "://" not in folder.url else range(1, 1)
    if not numbers:
        pytest.skip("ten thousand objects: on the local disk only")
    path = Path(folder.url) / "tpu_0" / "commits"
    path.mkdir(parents=True)
    for number in numbers:
        commit = Commit(number, "long", store.record.id, (), (Skip(number - 1, "t", "empty"),), None)
        (path / f"{number:04d}.json").write_bytes(commit.to_bytes())
    ledger = read_ledger(below, store.record.id)
    assert ledger.commits == 10_011
    assert ledger.done.pairs() == [(0, 10_011)]
    again = joined(folder, samples=None)
    again.commit([], skips(10_011), end=10_012)
    assert (path / "10012.json").exists()
    assert again.begin([sample_of(1)]).name.startswith("shard_10013-")
    (path / "10001.json").unlink()
    with pytest.raises(Damaged, match="found none numbered 10001"):
        joined(folder, samples=None)


def test_run_json_is_made_once_and_compared(folder: Folder) -> None:
    join_run(folder, run_identity())
    before = folder.get("run.json")
    join_run(folder, run_identity(model="same/weights-elsewhere", revision="main"))
    with pytest.raises(RunMismatch) as caught:
        join_run(folder, run_identity(weights="other", max_seq_length=128))
    line = str(caught.value)
    created = "was created with max_seq_length 64, weights wwwwwwww"
    assert f"{created}, but this command asks for max_seq_length 128, weights other. Give the same settings" in line
    assert caught.value.exit_code == 2
    assert folder.get("run.json") == before
    assert read_run(folder) == run_identity()
    assert read_run(folder.child("elsewhere")) is None


def test_a_stream_of_other_data_or_taps_is_refused(folder: Folder) -> None:
    joined(folder)
    added = r"was created with taps residual.0, .*but this command asks for taps mlp.0. Use .*--add-taps mlp.0 --to "
    with pytest.raises(RunMismatch, match=added):
        join_stream(folder, 0, stream_identity(100, taps=(Tap("mlp", 0),)), run_identity())
    with pytest.raises(
        RunMismatch, match=r"with data of sha256 55555555.*, but .* data of sha256 66666666.*--worker-id"
    ):
        join_stream(folder, 0, stream_identity(100, sha256="66666666"), run_identity())
    assert join_stream(folder, 1, stream_identity(100, taps=(Tap("mlp", 0),)), run_identity()).ledger == Ledger()


def test_metadata_has_the_guides_fields_and_comes_from_the_ledger(folder: Folder) -> None:
    store = produce(folder, 25)
    stored = json.loads(folder.get("tpu_0/metadata.json"))
    assert (stored["worker_id"], stored["total_samples"], stored["total_shards"]) == (0, 23, 3)
    assert stored["status"] == "completed"
    assert stored["shards"][0] == {
        "shard_id": 1,
        "file": store.ledger.files[0].name,
        "samples": 10,
        "tokens": store.ledger.files[0].tokens,
        "size": store.ledger.files[0].size,
    }
    part = joined(folder.child("elsewhere"))
    part.commit([shard(part, 0)], [])
    assert part.finish()["status"] == "partial"


def test_a_pod_commits_one_shard_of_each_host(folder: Folder) -> None:
    store = joined(folder, "pod1")
    other = joined(folder, "pod1")
    builders = [store.begin([sample_of(0)], host=0), other.begin([sample_of(1)], host=1)]
    assert [builder.name[11:] for builder in builders] == ["pod1-h00.safetensors", "pod1-h01.safetensors"]
    for index, builder in enumerate(builders):
        write_shard(builder, [sample_of(index)])
    records = [ShardRecord.from_json(json.loads(json.dumps(builder.finish().to_json()))) for builder in builders]
    store.commit(records, [])
    assert joined(folder).ledger.done.pairs() == [(0, 2)]


def test_clearing_leaves_a_shorter_ledger_at_every_step(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill at any deletion, the stream is a prefix of the old one, or empty."""
    step = 0
    while True:
        root = folder.child(f"case{step}")
        produce(root, 40)
        assert stream_has_commits(root, 0)
        whole = joined(root, samples=40).ledger
        if _clear_until(root, step, monkeypatch):
            break
        record = read_stream(root.child("tpu_0"))
        assert record is not None
        left = read_ledger(root.child("tpu_0"), record.id)
        assert left.files == whole.files[: left.shards]
        if left.commits < whole.commits or step > 0:
            assert not any(info.key == "metadata.json" for info in root.child("tpu_0").list())
        produce(root, 40)
        assert joined(root, samples=40).ledger.done == whole.done
        step += 1
    assert step == 1 + 5 + 4 + 2  # the fence is a commit too
    assert list(root.list("tpu_0/")) == []
    assert not stream_has_commits(root, 0)


def _clear_until(root: Folder, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Clear the stream, interrupted before deletion number ``step``; return True if it finished."""
    deletions = iter(range(step))
    kind = type(root)
    real = kind.delete

    def delete(self: Folder, key: str) -> None:
        if next(deletions, None) is None:
            raise InterruptedError
        real(self, key)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(kind, "delete", delete)
        try:
            clear_stream(root, 0)
        except InterruptedError:
            return False
    return True


def test_a_worker_that_slept_through_overwrite_stops_at_its_next_commit(folder: Folder) -> None:
    zombie = joined(folder, "zombie")
    zombie.commit([shard(zombie, 0)], [])
    clear_stream(folder, 0)
    record = shard(zombie, 1)
    with pytest.raises(StoreError, match=r"stream.json is gone"):
        zombie.commit([record], [])
    heir = joined(folder, "heir")
    with pytest.raises(Fenced, match=r"tpu_0 was started again: expected stream id \w+, found \w+\. This worker stops"):
        zombie.commit([record], [])
    with pytest.raises(Fenced, match="was started again"):
        zombie.finish()
    assert heir.ledger == joined(folder).ledger == Ledger()


def zombie_commits(zombie: StreamWriter, number: int, index: int) -> None:
    """Commits of a worker that was suspended between its check of stream.json and its commit, and is now outdated."""
    commit = Commit(number, "zombie", zombie.record.id, (shard(zombie, index),), (), None)
    assert zombie.folder.create(commit_key(number), commit.to_bytes())


def test_stale_commits_keep_their_numbers_and_are_ignored(folder: Folder) -> None:
    zombie = joined(folder, "zombie")
    clear_stream(folder, 0)
    heir = joined(folder, "heir")
    for number in (2, 3, 7):
        zombie_commits(zombie, number, number)
    heir.commit([shard(heir, 0)], [])
    assert joined(folder).ledger.commits == 1
    heir.commit([shard(heir, 1)], [])  # as number 4, after the stale commits
    again = joined(folder, "late")
    assert (again.ledger.commits, again.ledger.done.pairs()) == (4, [(0, 2)])
    heir.commit([], skips(2))
    with pytest.raises(Fenced, match="another worker owns this stream"):
        again.commit([], skips(2))
    folder.child("tpu_0").delete(commit_key(4))
    with pytest.raises(Damaged, match="has a gap: expected commits 1 to 7, found none numbered 4"):
        joined(folder)


def test_a_ledger_with_stale_commits_is_repaired_and_can_be_restored(folder: Folder) -> None:
    join_run(folder, run_identity())
    zombie = joined(folder, "zombie", samples=2)
    clear_stream(folder, 0)
    heir = joined(folder, "heir", samples=2)
    heir.commit([shard(heir, 0)], [])
    for number in (3, 4, 5_000_000):
        zombie_commits(zombie, number, number)
    below = folder.child("tpu_0")
    strays = {number: below.get(commit_key(number)) for number in (3, 4, 5_000_000)}
    output = verify(folder)
    assert output.streams[0].stale_commits.pairs() == [(3, 5), (5_000_000, 5_000_001)]
    (stream,) = verify(folder, repair=True).streams
    assert stream.kept is not None
    assert len(stream.kept) == 3
    with pytest.raises(Fenced):
        heir.commit([shard(heir, 1)], [])  # it had joined before the fence
    again = joined(folder, "next", samples=2)
    assert (again.ledger.commits, again.ledger.done.pairs()) == (4, [(0, 1)])
    again.commit([shard(again, 1)], [])
    assert verify(folder).ok
    assert not verify(folder).streams[0].stale_commits
    assert [below.get(f"strays/{number:04d}-{zombie.record.id}.json") for number in strays] == list(strays.values())
    for number, data in strays.items():
        below.put(commit_key(number), data)
    assert verify(folder).ok, "put back, they count for nothing as before"


def test_one_stray_commit_hangs_nothing(folder: Folder) -> None:
    store = joined(folder)
    store.commit([], skips(0))
    stray = Commit(99_999_999, "a", store.record.id, (), (), None).to_bytes()
    folder.child("tpu_0").put("commits/99999999.json", stray)
    with pytest.raises(Damaged, match="has a gap: expected commits 1 to 99999999, found none numbered 2-99999998"):
        joined(folder)
    folder.child("tpu_0").put("commits/99999999.json", b"a shopping list")
    with pytest.raises(Damaged, match=r"commits/99999999.json is incomplete"):
        joined(folder)


def test_a_worker_does_not_claim_what_is_no_longer_there(folder: Folder) -> None:
    def worked(name: str) -> StreamWriter:
        store = joined(folder.child(name))
        for index in range(3):
            store.commit([shard(store, index)], [])
        return store

    store = worked("commits")
    for number in (1, 2, 3):
        store.folder.delete(commit_key(number))
    with pytest.raises(Damaged, match=r"has lost committed data.*found samples 0-2 no longer committed"):
        store.finish()
    store = worked("shards")
    store.folder.delete(store.ledger.files[1].name)
    with pytest.raises(Damaged, match="found 1 shards gone or cut"):
        store.finish()
    store = worked("all")
    for info in list(store.folder.list()):
        store.folder.delete(info.key)
    with pytest.raises(StoreError, match=r"stream.json is gone"):
        store.finish()
    assert worked("none").finish()["total_samples"] == 3


def test_scattered_samples_add_up_in_one_pass() -> None:
    """One sort for any number of commits gives the same result as adding them one by one."""
    stripes = [Ranges([(start, start + 1) for start in range(place, 400, 20)]) for place in range(20)]
    records = [ShardRecord(f"s{n}", 5, 1, (4096, 1), {}, samples, 20, 40) for n, samples in enumerate(stripes)]
    commits = [Commit(n, "a", "i", (record,), (), None) for n, record in enumerate(records, 1)]
    at_once, one_run_per_layer = Ledger().plus(commits), Ledger()
    for commit in commits:
        one_run_per_layer = one_run_per_layer.plus([commit])
    assert at_once == one_run_per_layer
    assert at_once.done.pairs() == [(0, 400)]
    assert Ledger().plus([*commits, replace(commits[3], number=21)]).doubled == stripes[3]


def test_a_local_root_is_the_path_as_typed(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 3)
    assert (tmp_path / "tpu_0" / "commits" / "0001.json").is_file()


@pytest.mark.parametrize("extra", ["a shard", "a skip"])
def test_doubled_samples_are_found_when_the_ledger_is_read_back(folder: Folder, extra: str) -> None:
    """A forged commit doubles a sample. It is not lost, and the error says what is doubled."""
    join_run(folder, run_identity())
    store = joined(folder)
    for index in range(3):
        store.commit([shard(store, index)], [])
    forger = StreamWriter(store.folder, store.record, store.run, "abcdef", Ledger(commits=3))
    if extra == "a shard":
        forger.commit([shard(forger, 1)], [])
    else:
        forger.commit([], [Skip(1, "one", "too long")])
    found = r"list samples twice, as stored or as skipped: expected each sample once, found samples 1 twice\. Find out"
    with pytest.raises(Damaged, match=found):
        store.finish()
    (stream,) = verify(folder).streams
    assert "doubled" in [problem.kind for problem in stream.problems]
