"""A pod whose hosts write to their own disks: one stream, whose parts together are a dataset that verify proves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from pod.launching import clean_environment, started
from ports import free_port
from spile.errors import Damaged
from spile.hosts.files import assemble
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.store.writer import StreamRecord, read_stream, stream_bytes
from world import produce

pytestmark = pytest.mark.slow
WORDS = (
    "extract --model embedded --dataset embedded --max-samples 12 --max-seq-length 64 --layers 1 --batch-size 1",
    "--shard-size-gb 1e-5 --output ./activations --barrier-timeout 150 --num-processes 2",
)


def run(disks: list[Path]) -> list[str]:
    """The same command on both hosts, each with a disk of its own; what the first said."""
    place = f"127.0.0.1:{free_port()}"
    commands = []
    for number, disk in enumerate(disks):
        disk.mkdir(exist_ok=True)
        words = [*" ".join(WORDS).split(), "--coordinator-address", place, "--process-id", str(number)]
        commands.append(["sh", "-c", f'cd {disk} && exec "$@"', "sh", sys.executable, "-m", "spile.cli.main", *words])
    with started(commands, [clean_environment(1)] * 2) as group:
        ended = group.wait(280)
    assert [end.code for end in ended] == [0, 0], [end.err for end in ended]
    return ended[0].out.splitlines()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[str]]:
    """The disks of two hosts after a run, and what the first host said."""
    folder = tmp_path_factory.mktemp("hosts")
    disks = [folder / "host0", folder / "host1"]
    return disks, run(disks)


def test_what_hosts_kept_on_their_own_disks_is_one_dataset_that_verify_proves(
    ran: tuple[list[Path], list[str]], tmp_path: Path
) -> None:
    disks, output = ran
    assert any("on each host's own disk" in line and "spile collect" in line for line in output), output
    (hint,) = [line for line in output if line.startswith("next ")]
    assert f"spile collect {disks[0]}/activations --tpu-prefix NAME && spile verify collected_activations" in hint
    parts = [disk / "activations" for disk in disks]
    records = [read_stream(open_folder(str(part / "stream_0"))) for part in parts]
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].id == records[1].id, "one stream id for the pod"
    assert not verify(str(parts[0]), max_samples=12).ok, "half of it is elsewhere"
    assert assemble(tmp_path / "all", parts)
    report = verify(str(tmp_path / "all"), max_samples=12)
    assert report.ok, [problem.line() for problem in report.all_problems]
    assert sum(stream.samples for stream in report.streams) == 12


def test_parts_of_a_stream_and_of_its_second_start_are_not_merged(
    ran: tuple[list[Path], list[str]], tmp_path: Path
) -> None:
    disks = [Path(shutil.copytree(disk, tmp_path / disk.name)) for disk in ran[0]]
    file = disks[1] / "activations" / "stream_0" / "stream.json"
    record = read_stream(open_folder(str(file.parent)))
    assert record is not None
    other = StreamRecord("5" * 16, record.worker_id, record.fingerprint, record.identity)
    file.write_bytes(stream_bytes(other))
    with pytest.raises(Damaged, match=r"hold different streams for stream_0"):
        assemble(tmp_path / "all", [disk / "activations" for disk in disks])


def test_only_files_of_the_dataset_are_assembled(tmp_path: Path) -> None:
    parts = [tmp_path / "worker_0", tmp_path / "worker_1"]
    for part in parts:
        produce(open_folder(str(part)), 12, worker_id=parts.index(part))
    wanted = {path.relative_to(part) for part in parts for path in part.rglob("*") if path.is_file()}
    (parts[0] / ".env").write_text("secret")
    (parts[1] / "tpu_1" / "notes.txt").write_text("mine")
    (parts[1] / "tpu_1" / "suspects.json").symlink_to("/etc/hostname")
    assert assemble(tmp_path / "all", parts)
    assert {path.relative_to(tmp_path / "all") for path in (tmp_path / "all").rglob("*") if path.is_file()} == wanted
    assert verify(str(tmp_path / "all")).ok
