"""What hosts keep, brought back over real sshds."""

from __future__ import annotations

import os
from pathlib import Path

from fleet.ssh.loopback import Hosts, done


def fill(hosts: Hosts) -> list[dict[str, bytes]]:
    """Each host keeps two shards of its own."""
    kept = []
    for number, host in enumerate(hosts.hosts):
        tree = {f"tpu_{number}/shard_0001.bin": os.urandom(200_000), f"tpu_{number}/commits/0001.json": b"{}"}
        for path, data in tree.items():
            (host.home / "activations" / path).parent.mkdir(parents=True, exist_ok=True)
            (host.home / "activations" / path).write_bytes(data)
        kept.append(tree)
    return kept


def found(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_folder_a_worker_and_nothing_twice(hosts: Hosts, tmp_path: Path) -> None:
    kept = fill(hosts)
    words = ["collect", "~/activations", "--into", "back", *hosts.flags()]
    code, out, err = done(tmp_path, *words)
    assert (code, err) == (0, "")
    assert [found(tmp_path / "back" / f"worker_{number}") for number in range(4)] == kept
    assert f"{hosts[3].name}: 2 files (0.2 MB, 0.2 MB sent) → back/worker_3\n" in out

    damaged = tmp_path / "back" / "worker_1" / "tpu_1" / "shard_0001.bin"
    damaged.write_bytes(b"x" * 200_000)
    (hosts[0].home / "activations" / "more").write_bytes(b"more")
    code, out, _ = done(tmp_path, *words)
    assert code == 0
    assert found(tmp_path / "back" / "worker_1") == kept[1]
    assert found(tmp_path / "back" / "worker_0") == {**kept[0], "more": b"more"}
    assert f"{hosts[1].name}: 2 files (0.2 MB, 0.2 MB sent)" in out
    assert f"{hosts[2].name}: 2 files (0.2 MB, 0.0 MB sent)" in out
    assert hosts.processes() == []


def test_several_slices_are_kept_apart(hosts: Hosts, tmp_path: Path) -> None:
    kept = fill(hosts)
    slices = ["--hosts", hosts.named(0, 1), "--hosts", hosts.named(2), *hosts.flags()[2:]]
    assert done(tmp_path, "collect", "~/activations", "--into", "back", *slices)[0] == 0
    assert found(tmp_path / "back" / hosts[1].name / "worker_1") == kept[1]
    assert found(tmp_path / "back" / hosts[2].name / "worker_0") == kept[2]


def test_a_folder_that_is_not_there_is_one_line(hosts: Hosts, tmp_path: Path) -> None:
    fill(hosts)
    (hosts[2].home / "activations").rename(hosts[2].home / "elsewhere")
    code, _, err = done(tmp_path, "collect", "~/activations", *hosts.flags(2))
    assert (code, err) == (2, f"spile: {hosts[2].name}: no such folder: ~/activations\n")
    assert not (tmp_path / "collected_activations").exists()
