"""``spile verify``: check every sample, checksum, shape and index of a dataset in one pass with bounded memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

from spile.errors import Failure, SpecError, UserError, untrusted
from spile.objects import open_folder
from spile.objects.folder import Folder, NotFound
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, RunSpec
from spile.spec.sample import BAD_ROW
from spile.spec.taps import row_bytes
from spile.store.cleanup import HOUR, find_garbage, free_number, remove_garbage, repair_ledger
from spile.store.layout import (
    COMMITS,
    RUN,
    SPEC,
    STREAM,
    commit_number,
    is_addition,
    is_shard,
    list_streams,
    one_folder,
    stream_number,
)
from spile.store.ledger import Commit, Ledger, ShardRecord, read_entries
from spile.store.parts import CheckedCommits, DatasetPart, RunParts, divide
from spile.store.predictions import Decode
from spile.store.recomputation import Recompute, compare
from spile.store.report import Problem, Report, StreamReport
from spile.store.shard_check import inspect_shard
from spile.store.stream import StreamRecord, read_run, read_stream, rows_recorded
from spile.store.streams import (
    CONCURRENT_REQUESTS,
    Addition,
    Stream,
    alignment,
    expected_streams,
    foreign_reason,
    judge_split,
)

_BAD_ROWS = 10
"""Bad rows of a stream that the report names."""


class _StreamEvidence:
    """The records, commits and problems of one stream that were found so far."""

    def __init__(self, number: int, root: Folder, name: str, added: str = "") -> None:
        self.number, self.name = number, name
        self.path = name + (f"/{added}" if added else "")
        self.folder = root.child(self.path)
        self.record: StreamRecord | None = None
        self.commits: tuple[Commit, ...] = ()
        self.foreign_commits: tuple[Commit, ...] = ()
        self.readable = False
        self.problems: list[Problem] = []
        self.checked: dict[str, list[Problem]] = {}
        """The problems of each checked shard, by its name."""
        self.additions: list[_StreamEvidence] = []
        """The ledgers of taps that were added to the stream."""

    @property
    def ledgers(self) -> list[_StreamEvidence]:
        """The stream's own ledger and those of added taps."""
        return [self, *self.additions]

    @property
    def shards(self) -> list[ShardRecord]:
        return [shard for commit in self.commits for shard in commit.shards]

    @property
    def all_problems(self) -> list[Problem]:
        """The problems of the ledger, then those of its shards in the order of the commits."""
        return self.problems + [problem for shard in self.shards for problem in self.checked.get(shard.name, ())]

    @property
    def names(self) -> list[str]:
        answers = [shard.predictions.name for shard in self.shards if shard.predictions is not None]
        return [*(shard.name for shard in self.shards), *answers]


def verify(
    root: str | Folder,
    *,
    streams: Collection[int] | None = None,
    max_samples: int | None = None,
    recompute: Recompute | None = None,
    k: int = 0,
    seed: int = 0,
    gc: bool = False,
    remove: bool = False,
    repair: bool = False,
    older_than: float = HOUR,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    now: float | None = None,
    decode: Decode | None = None,
    run_parts: RunParts | None = None,
    processes: int = 1,
) -> Report:
    """Check every sample, every checksum and every shape of the dataset at ``root``.

    ``streams`` selects streams; None checks all, and reports streams of the split that were never started.
    ``max_samples`` replaces the ``--max-samples`` of the run, whose limits are read from ``spec.json``. ``recompute``
    computes ``k`` random samples again and compares them. ``gc`` searches for garbage older than ``older_than``
    seconds, and ``remove`` removes it. ``repair`` replaces commits of earlier incarnations and keeps copies.
    ``progress`` gets the checked and total bytes. ``decode`` returns the text of token ids, to compare it with the
    texts of answers. ``run_parts`` checks shards in other processes with :func:`verify_part`, ``processes`` at a time;
    this process then reads only the ledgers and merges the results, so that the report is the same.
    """
    folder = open_folder(root) if isinstance(root, str) else root
    run = _run_of(folder)
    found = _read_ledgers(folder, run, lambda number: streams is None or number in streams)
    records = [stream.record for stream in found if stream.record is not None]
    never, problems = judge_split(folder.url, [stream.number for stream in found], records, streams)
    total = sum(shard.size for stream in found for ledger in stream.ledgers for shard in ledger.shards)
    count = _Counter(lambda done: progress(done, total))
    unchecked: tuple[str, ...] = ()
    if run_parts is not None:
        unchecked = _use_results(run_parts(divide(_commit_sizes(found), processes)), found, count)
    _inspect(found, run, workers or _workers(folder), count, decode)
    recomputed = None
    if recompute is not None and k:
        readable = [_stream(stream, stream.record) for stream in found if stream.record and stream.readable]
        recomputed, wrong = compare(run, readable, recompute, k, seed)
        problems += wrong
    asked = _asked(folder, max_samples)
    report = Report(
        folder.url,
        run.fingerprint(),
        tuple(_judge(stream, run, asked) for stream in found),
        asked=asked.limits,
        recomputed=recomputed,
        problems=tuple(problems),
        streams_expected=expected_streams(records),
        never_begun=never,
        unchecked=unchecked,
    )
    if repair:
        report = replace(report, streams=tuple(map(_repaired, found, report.streams)))
    return _collect(folder, found, report, remove, older_than, now) if gc or remove else report


def _asked(root: Folder, max_samples: int | None) -> DataSpec:
    """Return the limits that the last command of the run was given; no limit if there is no readable ``spec.json``.

    Without the limits more samples are expected, so an unreadable spec never makes an incomplete dataset complete.
    """
    try:
        asked = RunSpec.from_json(root.get(SPEC), f"{root.url}/{SPEC}").data
    except (NotFound, SpecError):
        asked = DataSpec()
    return asked if max_samples is None else replace(asked, max_samples=max_samples)


def _repaired(stream: _StreamEvidence, report: StreamReport) -> StreamReport:
    if stream.record is None or not stream.readable or not stream.foreign_commits:
        return report
    return replace(report, kept=repair_ledger(stream.folder, stream.record.id, stream.commits, stream.foreign_commits))


def _workers(root: Folder) -> int:
    """Return the number of threads: bound by the cores for a disk, and by the latency for a bucket."""
    return min(16, 2 * (os.cpu_count() or 1)) if root.local_path is not None else CONCURRENT_REQUESTS


def _stream(stream: _StreamEvidence, record: StreamRecord) -> Stream:
    """Return the stream with its readable additions, for reading rows."""
    added = [Addition(each.folder, each.record) for each in stream.additions if each.record and each.readable]
    return Stream(stream.folder, record, added)


def _folders(root: Folder) -> dict[int, tuple[str, set[str]]]:
    """Map each stream, even without a ``stream.json``, to the name of its folder and of those of added taps."""
    found: dict[int, str] = {}
    additions: dict[int, set[str]] = {}
    for info in list_streams(root):
        name, _, rest = info.key.partition("/")
        added, _, inner = rest.partition("/")
        inside = is_addition(added)
        number, key = stream_number(name), inner if inside else rest
        if number is not None and (key == STREAM or commit_number(key) is not None or is_shard(key)):
            one_folder(root, found, number, name)
            additions.setdefault(number, set()).update([added] if inside else [])
    return {number: (found[number], additions[number]) for number in sorted(found)}


def _run_of(root: Folder) -> RunIdentity:
    run = read_run(root)
    if run is None:
        raise UserError(f"no dataset at {root.url}", expected=f"a folder with {RUN}", found="none")
    return run


def _read_ledgers(root: Folder, run: RunIdentity, wanted: Callable[[int], bool]) -> list[_StreamEvidence]:
    there = {number: names for number, names in _folders(root).items() if wanted(number)}
    with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="ledgers") as pool:
        return list(pool.map(lambda number: _read(number, root, run, *there[number]), there))


def _read(number: int, root: Folder, run: RunIdentity, name: str, added: Collection[str]) -> _StreamEvidence:
    stream = _read_ledger(number, root, run, name)
    if stream.record is not None:
        every = [_read_ledger(number, root, run, name, each) for each in sorted(added)]
        # Additions to an earlier incarnation of the stream are not a problem: readers ignore them.
        stream.additions = [each for each in every if each.record is None or each.record.base == stream.record.id]
    return stream


def _read_ledger(number: int, root: Folder, run: RunIdentity, name: str, added: str = "") -> _StreamEvidence:
    stream = _StreamEvidence(number, root, name, added)
    where = stream.folder.url
    try:
        stream.record = read_stream(stream.folder)
        if stream.record is None:
            stream.problems.append(Problem("damaged", where, f"{STREAM} is gone"))
            return stream
        if why := foreign_reason(stream.record, number, run):
            stream.problems.append(Problem("damaged", where, why))
        entries = tuple(read_entries(stream.folder, stream.record.id))
        stream.commits = tuple(commit for commit in entries if commit.stream == stream.record.id)
        stream.foreign_commits = tuple(commit for commit in entries if commit.stream != stream.record.id)
        stream.readable = True
    except Failure as error:
        stream.problems.append(Problem("damaged", f"{where}/{COMMITS.rstrip('/')}", str(error)))
    return stream


def _inspect(
    streams: Sequence[_StreamEvidence],
    run: RunIdentity,
    workers: int,
    seen: Callable[[int], None],
    decode: Decode | None,
    part: DatasetPart | None = None,
) -> None:
    """Check the shards, or those of a part, that no other process has checked; keep the problems of each."""

    def one(task: tuple[_StreamEvidence, StreamRecord, ShardRecord]) -> tuple[_StreamEvidence, str, list[Problem]]:
        ledger, record, shard = task
        return ledger, shard.name, inspect_shard(ledger.folder, shard, record, run, seen, decode)

    tasks = [
        (ledger, ledger.record, shard)
        for stream in streams
        for ledger in stream.ledgers
        for commit in ledger.commits
        for shard in commit.shards
        if ledger.record is not None and shard.name not in ledger.checked
        if part is None or part.has_commit(commit.number)
    ]
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        for ledger, name, problems in pool.map(one, tasks):
            ledger.checked[name] = problems


class _Counter:
    """Adds up checked bytes for a progress bar. A lost update between threads is harmless."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report, self._done = report, 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._report(self._done)


def _commit_sizes(streams: Sequence[_StreamEvidence]) -> dict[int, Counter[int]]:
    sizes: dict[int, Counter[int]] = {}
    for stream in streams:
        counter = sizes.setdefault(stream.number, Counter())
        for ledger in stream.ledgers:
            for commit in ledger.commits:
                counter[commit.number] += sum(shard.size for shard in commit.shards)
    return sizes


def verify_part(root: Folder, part: DatasetPart, decode: Decode | None, unchecked: Sequence[str]) -> dict[str, Any]:
    """Check the shards of a part; return which commits were checked and the problems of each shard, as JSON values."""
    run = _run_of(root)
    streams = _read_ledgers(root, run, part.has_stream)
    _inspect(streams, run, _workers(root), lambda _: None, decode, part)
    ledgers = [ledger for stream in streams for ledger in stream.ledgers if ledger.record is not None]
    checked = [
        CheckedCommits(
            ledger.path, ledger.record.id, Ranges.of(c.number for c in ledger.commits if part.has_commit(c.number))
        )
        for ledger in ledgers
        if ledger.record is not None
    ]
    wrong = [
        [ledger.path, name, [[problem.kind, problem.text] for problem in problems]]
        for ledger in ledgers
        for name, problems in ledger.checked.items()
        if problems
    ]
    return {"checked": [each.to_json() for each in checked], "problems": wrong, "unchecked": list(unchecked)}


def _use_results(
    results: Iterable[tuple[DatasetPart, Mapping[str, Any]]],
    streams: Sequence[_StreamEvidence],
    seen: Callable[[int], None],
) -> tuple[str, ...]:
    """Record what other processes have checked. Return what they could not check, and why."""
    ledgers = {ledger.path: ledger for stream in streams for ledger in stream.ledgers}
    unchecked: dict[str, None] = {}
    for _, result in results:
        with untrusted(Failure, "the result of a worker is malformed"):
            wrong = {
                (path, name): [Problem(kind, f"{ledgers[path].folder.url}/{name}", text) for kind, text in found]
                for path, name, found in result["problems"]
                if path in ledgers
            }
            checked = [CheckedCommits.from_json(fields) for fields in result["checked"]]
            unchecked |= dict.fromkeys(map(str, result["unchecked"]))
        for each in checked:
            ledger = ledgers.get(each.path)
            if ledger is None or ledger.record is None or ledger.record.id != each.stream:
                continue  # The stream was started again in the meantime.
            shards = [shard for commit in ledger.commits if commit.number in each.numbers for shard in commit.shards]
            ledger.checked |= {shard.name: wrong.get((each.path, shard.name), []) for shard in shards}
            seen(sum(shard.size for shard in shards))
    return tuple(unchecked)


def _judge(stream: _StreamEvidence, run: RunIdentity, asked: DataSpec) -> StreamReport:
    """Compare the stream's samples with those that it must have."""
    ledger = Ledger().plus(stream.commits)
    where = stream.folder.url
    identity = None if stream.record is None else stream.record.identity
    total = ledger.end if identity is None or identity.samples is None else identity.samples
    most = None if identity is None else asked.token_limit(row_bytes(identity.rows(run)))
    expected = ledger.expected(total, asked.max_samples, most)
    problems = [problem for each in stream.ledgers for problem in each.all_problems]
    problems += [problem for added in stream.additions for problem in _judge_added(stream, added)]
    missing = Ranges()
    if stream.readable:
        if expected is None:
            text = "its length is unknown until a worker has read it to the end"
            problems.append(Problem("missing", where, text))
        else:
            missing = Ranges([(0, expected)]) - ledger.done
        if missing:
            problems.append(Problem("missing", where, f"samples {missing.text()} ({len(missing)} of {expected})"))
        if ledger.doubled:
            problems.append(Problem("doubled", where, f"samples {ledger.doubled.text()}"))
        beyond = Ranges() if total is None else ledger.done - Ranges([(0, total)])
        if beyond:
            problems.append(
                Problem(
                    "damaged",
                    where,
                    f"samples {beyond.text()} are beyond the end of the stream, which has {total} samples",
                )
            )
        if identity is not None and identity.head is not None and not rows_recorded(ledger, run):
            problems.append(Problem("damaged", where, "its commits do not hold the hashes of all rows that were read"))
        ends = {commit.end for commit in stream.commits if commit.end is not None}
        if len(ends | ({total} if total is not None else set())) > 1:
            problems.append(Problem("damaged", where, f"its commits disagree about its end: {sorted(ends)}"))
    skips = [skip for commit in stream.commits for skip in commit.skipped]
    return StreamReport(
        number=stream.number,
        name=stream.name,
        expected=expected,
        samples=ledger.samples,
        skipped=ledger.skipped,
        quarantined=ledger.quarantined,
        skip_reasons=dict(Counter(skip.reason for skip in skips)),
        bad_rows=tuple(islice((str(skip.detail.get("error")) for skip in skips if skip.reason == BAD_ROW), _BAD_ROWS)),
        shards=sum(len(each.shards) for each in stream.ledgers),
        tokens=ledger.tokens,
        bytes=sum(shard.size for each in stream.ledgers for shard in each.shards),
        added=tuple(str(tap) for each in stream.additions if each.record for tap in each.record.identity.taps),
        predictions=sum(shard.predictions.count for shard in stream.shards if shard.predictions is not None),
        missing=missing,
        doubled=ledger.doubled,
        problems=tuple(problems),
        foreign_commits=Ranges.of(commit.number for commit in stream.foreign_commits),
    )


def _judge_added(stream: _StreamEvidence, added: _StreamEvidence) -> list[Problem]:
    """Check that added taps have each row of their stream once and no other rows."""
    if not added.readable or added.record is None or not stream.readable:
        return []
    where, taps = added.folder.url, " ".join(str(tap) for tap in added.record.identity.taps)
    own = Counter(alignment(shard) for shard in stream.shards)
    found = Counter(alignment(shard) for shard in added.shards)
    problems = []
    if strange := found.keys() - own.keys():
        text = f"{len(strange)} of its shards do not have the rows of any shard of the stream"
        problems.append(Problem("damaged", where, text))
    if any(count > 1 for count in found.values()):
        problems.append(Problem("doubled", where, "rows of one of the stream's shards are there twice"))
    if absent := own.keys() - found.keys():
        progress = f"{taps}: not yet added to {len(absent)} of {len(own)} shards"
        text = f"{progress}; spile extract --add-taps {taps} finishes them"
        problems.append(Problem("missing", where, text))
    return problems


def _collect(
    root: Folder, streams: Sequence[_StreamEvidence], report: Report, remove: bool, older_than: float, now: float | None
) -> Report:
    readable = [ledger for stream in streams for ledger in stream.ledgers if ledger.readable]
    named = {ledger.path: set(ledger.names) for ledger in readable}
    garbage = find_garbage(root, named, now=time.time() if now is None else now, older_than=older_than)
    if remove:
        ids = {
            ledger.path: (ledger.record.id, free_number(ledger.commits, ledger.foreign_commits))
            for ledger in readable
            if ledger.record is not None
        }
        garbage = remove_garbage(root, garbage, ids)
    return replace(report, garbage=tuple(garbage))
