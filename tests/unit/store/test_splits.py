"""verify reports streams that were never started, which it knows from the split."""

from __future__ import annotations

import json
from dataclasses import replace

from spile.objects import Folder
from spile.proof.verification import verify
from spile.store.layout import commit_key
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import run_identity, stream_identity


def lines(folder: Folder, **options: object) -> list[str]:
    report = verify(folder, **options)  # type: ignore[arg-type]
    return [problem.line().replace(folder.url, "ROOT") for problem in report.all_problems]


def begin(folder: Folder, number: int, streams: int | None, split: str | None = "5" * 32) -> None:
    """A stream without samples: done as soon as it is begun."""
    join_run(folder, run_identity())
    identity = replace(stream_identity(0), streams=streams, split=split if streams is not None else None)
    join_stream(folder, number, identity, run_identity())


def test_streams_that_were_never_begun_are_missing(folder: Folder) -> None:
    begin(folder, 0, 8)
    begin(folder, 3, 8)
    assert lines(folder) == ["missing: ROOT: streams 1-2, 4-7 were never begun (6 of 8)"]
    report = verify(folder)
    assert (report.streams_expected, report.never_begun.pairs()) == (8, [(1, 3), (4, 8)])
    output = json.loads(json.dumps(report.to_json()))
    assert (output["ok"], output["streams_expected"], output["never_begun"]) == (False, 8, [[1, 3], [4, 8]])
    for number in (1, 2, 4, 5, 7):
        begin(folder, number, 8)
    assert lines(folder) == ["missing: ROOT: stream 6 was never begun (1 of 8)"]
    begin(folder, 6, 8)
    assert lines(folder) == []


def test_streams_that_say_nothing_of_a_split_ask_for_no_others(folder: Folder) -> None:
    begin(folder, 2, None)
    assert lines(folder) == []
    assert verify(folder).streams_expected is None
    begin(folder, 5, None)
    assert lines(folder) == []


def test_a_stream_without_a_split_next_to_a_split_is_named(folder: Folder) -> None:
    """Four streams, then two, then four again: the last two are left from the first split, and no list has them."""
    for number in (0, 1):
        begin(folder, number, 2)
    for number in (2, 3):
        begin(folder, number, None)
    (line,) = lines(folder)
    assert line == (
        "wrong: ROOT: its streams are of different splits of the data: "
        f"stream 0 and 1 more of 2 streams (split {'5' * 32}); stream 2 and 1 more of no split"
    )
    assert not verify(folder).ok


def test_some_streams_alone(folder: Folder) -> None:
    begin(folder, 0, 4)
    begin(folder, 2, 4)
    (folder.child("tpu_2")).delete("stream.json")
    folder.child("tpu_2").put(commit_key(1), b"nonsense")
    assert lines(folder, streams=[0]) == []
    assert lines(folder, streams=[0, 2]) == ["damaged: ROOT/tpu_2: stream.json is gone"]
    assert lines(folder, streams=[3]) == ["missing: ROOT: stream 3 was never begun (1 of 1)"]
    assert len(lines(folder)) == 2


def test_streams_of_different_splits_are_distinguished(folder: Folder) -> None:
    begin(folder, 0, 2, "a" * 32)
    begin(folder, 1, 2, "b" * 32)
    mixed = "wrong: ROOT: its streams are of different splits of the data: "
    assert lines(folder) == [
        f"{mixed}stream 0 of 2 streams (split {'a' * 32}); stream 1 of 2 streams (split {'b' * 32})"
    ]
    begin(folder, 2, 3, "c" * 32)
    begin(folder, 3, None)
    assert lines(folder)[0].endswith(f"; stream 2 of 3 streams (split {'c' * 32}); stream 3 of no split")


def test_a_stream_without_a_split_continues(folder: Folder) -> None:
    begin(folder, 0, None)
    begin(folder, 0, 4)
    assert verify(folder).streams_expected is None
    assert "streams" not in json.loads(folder.child("tpu_0").get("stream.json"))
