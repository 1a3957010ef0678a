"""Files of a killed worker are removed by the next one; files of a live worker are not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from spile.objects import open_folder
from spile.spec.run import RunSpec
from spile.store.cleanup import remove_unfinished
from spile.store.writer import join_stream
from world import produce, run_identity, sample_of, stream_identity

_CHILD = """
import sys, time
sys.path.insert(0, {tests!r})
from world import run_identity, sample_of, stream_identity
from spile.objects import open_folder
from spile.store.writer import join_stream
store = join_stream(open_folder({root!r}), 0, stream_identity(45), run_identity())
builder = store.begin([sample_of(100)])
print("begun", flush=True)
time.sleep(600)
"""


def test_a_killed_workers_unfinished_shards_go_and_a_live_ones_stay(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 45)
    code = _CHILD.format(tests=str(Path(__file__).parents[1]), root=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        folder = join_stream(root, 0, stream_identity(45), run_identity()).folder
        assert remove_unfinished(folder) == (0, 0)
        child.send_signal(signal.SIGKILL)
    assert list(tmp_path.rglob(".tmp-*"))
    mine = join_stream(root, 0, stream_identity(45), run_identity()).begin([sample_of(101)])
    count, taken = remove_unfinished(folder)
    assert (count, taken > 4096) == (1, True)
    assert len(list(tmp_path.rglob(".tmp-*"))) == 1
    mine.abort()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert len(list(tmp_path.rglob("shard_*"))) == len(list(tmp_path.rglob("commits/*.json")))


def test_a_run_commits_every_minute_by_default() -> None:
    assert RunSpec().commit_every == 60
