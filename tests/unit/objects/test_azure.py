"""``az://`` against Azurite, Microsoft's emulator: every method of a folder, faults, commits and verification."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from test_faults import SIZE, _schedule, write
from test_folder import (  # noqa: F401 - collected here too, with the backend below
    test_aborted_writer_leaves_nothing,
    test_create_once,
    test_empty_and_odd_names,
    test_empty_writer,
    test_get_many_keeps_the_order,
    test_info,
    test_list_is_sorted_and_exact,
    test_put_get_replace_delete,
    test_ranges,
    test_read_chunks,
    test_sixteen_creators_one_winner,
    test_writer_shrinks_with_moves,
    test_writer_writes_anywhere_and_is_seen_at_once,
)

from backends import Clouds
from spile.errors import StoreError, UserError
from spile.objects import Folder, bucket, open_folder
from spile.objects.preflight import preflight
from spile.objects.retry import Retry
from spile.proof.verification import verify
from world import produce

pytestmark = pytest.mark.parametrize("folder_url", ["az"], indirect=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "60")
    monkeypatch.setattr(Retry, "first", 0.01)


@pytest.mark.parametrize("seed", range(6))
def test_random_faults(folder: Folder, clouds: Clouds, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(bucket, "PART", 5 << 20)
    payload = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
    _schedule(folder, clouds, seed, payload)


def test_a_lost_reply_to_a_commit_is_read_back(folder: Folder, clouds: Clouds) -> None:
    clouds.azure.faults.add("reset_after", method="PUT")
    assert folder.create("commits/0001.json", b"ours")
    assert folder.stats.retries == 1
    clouds.azure.faults.add("reset_after", method="PUT")
    assert not folder.create("commits/0001.json", b"theirs")


def test_an_upload_in_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PART", 1 << 20)
    data = np.random.default_rng(0).integers(0, 256, (3 << 20) + 17, np.uint8)
    write(folder, "shard", data)
    assert folder.get("shard") == data.tobytes()
    assert list(folder.unfinished()) == []


def test_a_run_is_stored_and_proven(folder: Folder) -> None:
    assert preflight(folder, environment={"SPILE_MACHINE_REGION": "none"}) == []
    produce(folder, 30)
    produce(folder, 30)
    assert verify(folder).ok


def test_errors_name_the_container_and_the_fix(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = r"there is no bucket az://nothing. Create it: az storage container create --name nothing$"
    with pytest.raises(UserError, match=missing):
        preflight(open_folder("az://nothing/x"), environment={"SPILE_MACHINE_REGION": "none"})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    with pytest.raises(StoreError, match=r"cannot read az://bucket/x/y: found 403.*\. Let this account read"):
        open_folder("az://bucket/x").get("y")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setattr("spile.objects.clouds.ask_metadata", lambda *_: None)
    with pytest.raises(UserError, match=r"no Azure credentials: expected AZURE_STORAGE_ACCOUNT_KEY, .*\. Set one, or"):
        open_folder("az://bucket/x").get("y")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(
        UserError, match=r"no storage account for az://bucket: .*\. Run: export AZURE_STORAGE_ACCOUNT_NAME"
    ):
        open_folder("az://bucket/x").get("y")
