"""``spile verify``: check every sample, checksum, shape and index of a dataset in one pass with bounded memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from spile.errors import Failure, UserError, untrusted
from spile.objects import open_folder
from spile.objects.folder import Folder
from spile.proof.comparison import Recompute, compare
from spile.proof.derived import CheckedLedger, OtherFiles
from spile.proof.repair import HOUR, find_garbage, free_number, remove_garbage, repair_ledger
from spile.proof.report import Problem, Report, StreamReport
from spile.proof.shard_check import check_shard
from spile.proof.split_check import check_split
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.sample import BAD_ROW
from spile.store.cleanup import fence
from spile.store.layout import COMMITS, RUN, STREAM, ListedStream, scan_streams
from spile.store.ledger import Commit, Ledger, ShardRecord, read_all_commits
from spile.store.parts import DatasetPart, RunParts
from spile.store.predictions import Decode
from spile.store.run import read_run
from spile.store.stored_stream import (
    CONCURRENT_REQUESTS,
    Stream,
    alignment,
    expected_streams,
    ownership_problem,
)
from spile.store.writer import StreamRecord, all_rows_hashed, read_stream

_BAD_ROWS = 10
"""Bad rows of a stream that the report names."""


class _LedgerCheck:
    """What was found so far about the ledger of a stream, or of taps that were added to it."""

    def __init__(self, number: int, root: Folder, path: str) -> None:
        self.number, self.path, self.folder = number, path, root.child(path)
        self.record: StreamRecord | None = None
        self.commits: tuple[Commit, ...] = ()
        self.stale: tuple[Commit, ...] = ()
        self.readable = False
        self.problems: list[Problem] = []
        self.checked: dict[str, list[Problem]] = {}
        """The problems of each checked shard, by its name."""
        self.additions: list[_LedgerCheck] = []
        """The ledgers of taps that were added to the stream."""

    @property
    def ledgers(self) -> list[_LedgerCheck]:
        """The stream's own ledger and those of added taps."""
        return [self, *self.additions]

    @property
    def shards(self) -> list[ShardRecord]:
        return [shard for commit in self.commits for shard in commit.shards]

    @property
    def names(self) -> set[str]:
        """The names of the committed shards and files of answers."""
        answers = {shard.predictions.name for shard in self.shards if shard.predictions is not None}
        return {shard.name for shard in self.shards} | answers

    @property
    def all_problems(self) -> list[Problem]:
        """The problems of the ledger, then those of its shards in the order of the commits."""
        return self.problems + [problem for shard in self.shards for problem in self.checked.get(shard.name, ())]


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
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    decode: Decode | None = None,
    run_parts: RunParts | None = None,
) -> Report:
    """Check every sample, every checksum and every shape of the dataset at ``root``.

    ``streams`` selects streams; None checks all, and reports streams of the split that were never started.
    ``max_samples`` is the number of samples to expect in each stream; None expects those of the data or, if limits of
    the run ended the stream, as many as the commits say. ``recompute`` computes ``k`` random samples again and compares
    them. ``gc`` searches for garbage older than ``older_than`` seconds, and ``remove`` removes it. ``repair`` replaces
    stale commits and keeps copies. ``progress`` gets the checked and total bytes. ``decode`` returns the text of token
    ids, to compare it with the texts of answers.
    ``run_parts`` checks shards in other processes with :func:`verify_part`; this process then reads only the ledgers
    and merges the results, so that the report is the same.
    """
    folder = open_folder(root) if isinstance(root, str) else root
    run = _require_run(folder)
    selected = partial(_is_selected, streams)
    others = OtherFiles(folder, selected)
    listed = scan_streams(folder, others.noted(folder.list()))
    found = _read_ledgers(folder, run, selected, listed)
    records = [stream.record for stream in found if stream.record is not None]
    never, problems = check_split(folder.url, [stream.number for stream in found], records, streams)
    sizes = _commit_sizes(found)
    count_bytes = _byte_counter(progress, sum(sum(commits.values()) for commits in sizes.values()))
    unchecked = () if run_parts is None else _merge_results(run_parts(sizes), found, count_bytes)
    _check_shards(found, run, count_bytes, decode)
    recomputed = None
    if recompute is not None and k:
        recomputed, wrong = compare(run, _readable_streams(found), recompute, k, seed)
        problems += wrong
    reports = tuple(_report_on(stream, run, max_samples) for stream in found)
    ledgers = list(chain.from_iterable(map(_checked_ledgers, found, reports)))
    all_streams = streams is None and not never and all(stream.readable for stream in found)
    others.check(run, ledgers, listed, all_streams=all_streams, max_samples=max_samples)
    problems += others.problems
    report = Report(
        folder.url,
        run.fingerprint(),
        reports,
        recomputed=recomputed,
        problems=tuple(problems),
        streams_expected=expected_streams(records),
        never_begun=never,
        unchecked=(*unchecked, *others.unchecked),
        max_seq_length=run.max_seq_length,
    )
    if repair:
        report = replace(report, streams=tuple(map(_repair, found, report.streams)))
    return _collect_garbage(folder, found, report, remove, older_than) if gc or remove else report


def verify_part(root: Folder, part: DatasetPart, decode: Decode | None, unchecked: Sequence[str]) -> dict[str, Any]:
    """Check the shards of a part; return which commits were checked and the problems of each shard, as JSON values."""
    run = _require_run(root)
    streams = _read_ledgers(root, run, part.has_stream, scan_streams(root))
    _check_shards(streams, run, lambda _: None, decode, part)
    checked = [
        {
            "path": ledger.path,
            "stream": ledger.record.id,
            "commits": [commit.number for commit in ledger.commits if part.has_commit(ledger.number, commit.number)],
            "problems": {
                name: [[problem.kind, problem.text] for problem in problems]
                for name, problems in ledger.checked.items()
            },
        }
        for stream in streams
        for ledger in stream.ledgers
        if ledger.record is not None
    ]
    return {"checked": checked, "unchecked": list(unchecked)}


def _merge_results(
    results: Iterable[Mapping[str, Any]], streams: Sequence[_LedgerCheck], count_bytes: Callable[[int], None]
) -> tuple[str, ...]:
    """Record what other processes have checked. Return what they could not check, and why."""
    ledgers = {(each.path, each.record.id): each for stream in streams for each in stream.ledgers if each.record}
    unchecked: dict[str, None] = {}
    for result in results:
        size = 0
        with untrusted(Failure, "the result of a worker is malformed"):
            unchecked |= dict.fromkeys(map(str, result["unchecked"]))
            for checked in result["checked"]:
                ledger = ledgers.get((checked["path"], checked["stream"]))
                if ledger is None:
                    continue  # The stream was started again in the meantime.
                numbers, url = set(checked["commits"]), ledger.folder.url
                for shard in (shard for each in ledger.commits if each.number in numbers for shard in each.shards):
                    wrong = checked["problems"].get(shard.name, ())
                    ledger.checked[shard.name] = [Problem(kind, f"{url}/{shard.name}", text) for kind, text in wrong]
                    size += shard.size
        count_bytes(size)
    return tuple(unchecked)


def _require_run(root: Folder) -> RunIdentity:
    run = read_run(root)
    if run is None:
        raise UserError(f"no dataset at {root.url}", expected=f"a folder with {RUN}", found="none")
    return run


def _is_selected(streams: Collection[int] | None, number: int) -> bool:
    return streams is None or number in streams


def _checked_ledgers(stream: _LedgerCheck, report: StreamReport) -> list[CheckedLedger]:
    """Return the readable ledgers of a stream, for the comparison of files that are derived from them."""
    complete = not any(problem.kind == "missing" for problem in report.problems)
    return [
        CheckedLedger(ledger.path, ledger.folder, ledger.record, ledger.commits, complete)
        for ledger in stream.ledgers
        if ledger.record is not None and ledger.readable
    ]


def _read_ledgers(
    root: Folder, run: RunIdentity, wanted: Callable[[int], bool], listed: Mapping[int, ListedStream]
) -> list[_LedgerCheck]:
    there = {number: files for number, files in listed.items() if wanted(number)}
    with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="ledgers") as pool:
        return list(pool.map(partial(_read, root, run), there, there.values()))


def _read(root: Folder, run: RunIdentity, number: int, files: ListedStream) -> _LedgerCheck:
    stream = _read_ledger(number, root, run, files.folder)
    if stream.record is not None:
        every = [_read_ledger(number, root, run, f"{files.folder}/{added}") for added in sorted(files.added)]
        # Taps that were added before the stream was started again are not a problem: readers ignore them.
        stream.additions = [each for each in every if each.record is None or each.record.base == stream.record.id]
    return stream


def _read_ledger(number: int, root: Folder, run: RunIdentity, path: str) -> _LedgerCheck:
    found = _LedgerCheck(number, root, path)
    where = found.folder.url
    try:
        found.record = read_stream(found.folder)
        if found.record is None:
            found.problems.append(Problem("damaged", where, f"{STREAM} is gone"))
            return found
        if why := ownership_problem(found.record, number, run):
            found.problems.append(Problem("damaged", where, why))
        commits = tuple(read_all_commits(found.folder, found.record.id))
        found.commits = tuple(commit for commit in commits if commit.stream == found.record.id)
        found.stale = tuple(commit for commit in commits if commit.stream != found.record.id)
        found.readable = True
    except Failure as error:
        found.problems.append(Problem("damaged", f"{where}/{COMMITS.rstrip('/')}", str(error)))
    return found


def _commit_sizes(streams: Sequence[_LedgerCheck]) -> dict[int, Counter[int]]:
    sizes: dict[int, Counter[int]] = {stream.number: Counter() for stream in streams}
    for stream in streams:
        for ledger in stream.ledgers:
            for commit in ledger.commits:
                sizes[stream.number][commit.number] += sum(shard.size for shard in commit.shards)
    return sizes


def _byte_counter(progress: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """Return a function that adds up checked bytes. A lost update between threads is harmless."""
    done = 0

    def count_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return count_bytes


def _check_shards(
    streams: Sequence[_LedgerCheck],
    run: RunIdentity,
    count_bytes: Callable[[int], None],
    decode: Decode | None,
    part: DatasetPart | None = None,
) -> None:
    """Check the shards, or those of a part, that no other process has checked; keep the problems of each."""

    def check(task: tuple[_LedgerCheck, StreamRecord, ShardRecord]) -> None:
        ledger, record, shard = task
        ledger.checked[shard.name] = check_shard(ledger.folder, shard, record, run, count_bytes, decode)

    tasks = [
        (ledger, ledger.record, shard)
        for stream in streams
        for ledger in stream.ledgers
        for commit in ledger.commits
        for shard in commit.shards
        if ledger.record is not None and shard.name not in ledger.checked
        if part is None or part.has_commit(ledger.number, commit.number)
    ]
    on_disk = all(ledger.folder.local_path is not None for ledger, _, _ in tasks)
    threads = min(16, 2 * (os.cpu_count() or 1)) if on_disk else CONCURRENT_REQUESTS  # A bucket is bound by latency.
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        for _ in pool.map(check, tasks):
            pass


def _readable_streams(streams: Sequence[_LedgerCheck]) -> list[Stream]:
    """Return the streams with their readable additions, for reading rows."""
    return [
        Stream(
            stream.folder,
            stream.record,
            [Stream(added.folder, added.record) for added in stream.additions if added.record and added.readable],
        )
        for stream in streams
        if stream.record and stream.readable
    ]


def _report_on(stream: _LedgerCheck, run: RunIdentity, max_samples: int | None) -> StreamReport:
    """Compare the stream's samples with those that it must have, according to create-only records alone."""
    ledger = Ledger().plus(stream.commits)
    where = stream.folder.url
    identity = None if stream.record is None else stream.record.identity
    total = ledger.end if identity is None or identity.samples is None else identity.samples
    expected = ledger.required(total) if max_samples is None else ledger.expected(total, max_samples)
    problems = [problem for each in stream.ledgers for problem in each.all_problems]
    problems += [problem for added in stream.additions for problem in _check_added_taps(stream, added)]
    missing = Ranges()
    if stream.readable:
        missing = Ranges([(0, expected or 0)]) - ledger.done
        if expected is None:
            problems.append(Problem("missing", where, "its length is unknown until a worker has read it to the end"))
        if missing:
            problems.append(Problem("missing", where, f"samples {missing.text()} ({len(missing)} of {expected})"))
        if ledger.doubled:
            problems.append(Problem("doubled", where, f"samples {ledger.doubled.text()}"))
        ends = {commit.end for commit in stream.commits if commit.end is not None}
        if total is not None:
            if beyond := ledger.done - Ranges([(0, total)]):
                text = f"samples {beyond.text()} are beyond the end of the stream, which has {total} samples"
                problems.append(Problem("damaged", where, text))
            if ends - {total}:
                problems.append(Problem("damaged", where, f"its commits disagree about its end: {sorted(ends)}"))
        if identity is not None and identity.head is not None and not all_rows_hashed(ledger, run):
            problems.append(Problem("damaged", where, "its commits do not hold the hashes of all rows that were read"))
    skips = [skip for commit in stream.commits for skip in commit.skipped]
    return StreamReport(
        number=stream.number,
        name=stream.path,
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
        stale_commits=Ranges.of(commit.number for commit in stream.stale),
        cut=ledger.cut,
        too_long=ledger.too_long,
        limits=f"--max-samples {max_samples}" if max_samples else ledger.limit.flags if ledger.limit else "",
    )


def _check_added_taps(stream: _LedgerCheck, added: _LedgerCheck) -> list[Problem]:
    """Check that added taps have each row of their stream once and no other rows."""
    if not added.readable or added.record is None or not stream.readable:
        return []
    where, taps = added.folder.url, " ".join(str(tap) for tap in added.record.identity.taps)
    own = Counter(alignment(shard) for shard in stream.shards)
    found = Counter(alignment(shard) for shard in added.shards)
    problems = []
    skips = {skip.index: skip for commit in stream.commits for skip in commit.skipped}
    unknown = [s.index for commit in added.commits for s in commit.skipped if s != skips.get(s.index)]
    if unknown:
        text = f"it skips samples {Ranges.of(unknown).text()}, which the stream does not skip for the same reason"
        problems.append(Problem("damaged", where, text))
    if doubled := Ledger().plus(added.commits).doubled:
        problems.append(Problem("doubled", where, f"samples {doubled.text()}"))
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


def _repair(stream: _LedgerCheck, report: StreamReport) -> StreamReport:
    if stream.record is None or not stream.readable or not stream.stale:
        return report
    return replace(report, kept=repair_ledger(stream.folder, stream.record.id, stream.commits, stream.stale))


def _collect_garbage(
    root: Folder, streams: Sequence[_LedgerCheck], report: Report, remove: bool, older_than: float
) -> Report:
    readable = [each for stream in streams for each in stream.ledgers if each.readable]
    named = {each.path: each.names for each in readable}
    garbage = find_garbage(root, named, now=time.time(), older_than=older_than)
    if remove:
        fences = {
            each.path: partial(
                fence, each.folder, each.record.id, free_number(each.commits, each.stale), "garbage was removed"
            )
            for each in readable
            if each.record is not None
        }
        garbage = remove_garbage(root, garbage, fences)
    return replace(report, garbage=tuple(garbage))
