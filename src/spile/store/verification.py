"""``spile verify``: check every sample, checksum, shape and index of a dataset in one pass with bounded memory."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import Damaged, Failure, SpecError, UserError
from spile.objects import open_folder
from spile.objects.crc import crc32c, fold, to_hex
from spile.objects.folder import Folder, NotFound
from spile.spec.identity import RunIdentity
from spile.spec.positions import ANSWER, LAST_CONTENT, choose_positions
from spile.spec.ranges import Ranges
from spile.spec.run import EVERY_FIELD, DataSpec, RunSpec
from spile.spec.sample import BAD_ROW, Prediction, Role
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
from spile.store.predictions import Decode, answers_problem, outside_vocabulary, read_predictions
from spile.store.recomputation import Recompute, compare
from spile.store.report import Problem, Report, StreamReport
from spile.store.shard import CHUNKS, CONTEXT, CONTEXT_OFFSETS, POSITIONS, TAIL, ShardSchema
from spile.store.shard_reader import ShardReader
from spile.store.statistics import SUMS, TapAccumulator, TapStatistics, TopRow
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
_PIECE = 8 << 20
"""Bytes that are read at once, in whole chunks, at least one chunk."""
# A value is infinite or NaN if all bits of its exponent are set.
_EXPONENT = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F8_E4M3": (np.uint8, 0x7F),  # It has no infinity, and only these bits are NaN.
}


def inspect_shard(
    folder: Folder,
    record: ShardRecord,
    stream: StreamRecord,
    run: RunIdentity,
    seen: Callable[[int], None] = lambda _: None,
    decode: Decode | None = None,
) -> list[Problem]:
    """Return the problems of a shard. ``seen`` is called with the number of bytes after each read.

    ``decode`` returns the text of token ids; None does not compare the texts of answers.
    """
    schema = replace(stream.schema(run), fingerprint=run.fingerprint())
    where = f"{folder.url}/{record.name}"
    try:
        size = folder.info(record.name).size
        if size != record.size:
            raise Damaged(f"{where} has the wrong size", expected=f"{record.size} bytes", found=size)
        shard = ShardReader(folder, record)
        wrong = _header(shard, schema) or _index(shard, schema.keep)
        sound = not wrong
        wrong += _bytes(shard, run, seen)
        if sound and stream.base is None:  # Added taps have the tokens of the stream, compared by their checksums.
            wrong += _content(shard, run, decode)
    except NotFound:
        return [
            Problem(
                "damaged", where, "the shard, or its answers, are gone" if record.predictions else "the shard is gone"
            )
        ]
    except Failure as error:
        return [Problem("damaged", where, str(error).removeprefix(f"{where} "))]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        # The checksums match but the content is invalid: the writer was faulty. Report it and check the other shards.
        return [Problem("damaged", where, f"its content is invalid: {type(error).__name__}: {error}")]
    return [Problem("damaged", where, text) for text in wrong]


def _header(shard: ShardReader, schema: ShardSchema) -> list[str]:
    header, record = shard.header, shard.record
    schema = replace(schema, statistics=any(name.endswith(SUMS) for name in header.places))  # optional
    context = header.places[CONTEXT].shape[0] if CONTEXT in header.places else 0  # _index checks the value
    shapes = schema.tensors(record.count, record.tokens, context)
    found = {name: (place.code, place.shape) for name, place in header.places.items() if name != CHUNKS}
    wanted = schema.metadata()
    says = [
        f"the header says {name} {header.metadata.get(name)}, expected {value}"
        for name, value in wanted.items()
        if header.metadata.get(name) != value
    ]
    if list(found) != list(shapes):
        says.append(f"it has the tensors {', '.join(found)}, expected {', '.join(shapes)}")
    else:
        says += [
            f"{name} is {found[name][0]} {list(found[name][1])}, expected {kind} {list(shape)}"
            for name, (kind, shape) in shapes.items()
            if found[name] != (kind, shape)
        ]
    if set(record.tensors) != set(header.places):
        says.append("the commit has checksums of other tensors")
    if any(tap + SUMS not in header.places for tap in record.statistics):
        says.append("the commit has statistics of taps whose sums the shard does not have")
    return says


def _index(shard: ShardReader, keep: tuple[str, ...]) -> list[str]:
    offsets, index = shard.read_tensor("offsets"), shard.read_tensor("sample_index")
    says = []
    if offsets[0] != 0 or offsets[-1] != shard.record.tokens or (np.diff(offsets) < 0).any():
        says.append("offsets do not rise from 0 to the number of tokens")
    if len(np.unique(index)) != len(index) or Ranges.of(index.tolist()) != shard.record.samples:
        says.append("sample_index is not the commit's samples")
    if [note.get("index") for note in shard.notes] != index.tolist():
        says.append("the header's samples are not those of sample_index")
    incomplete = [note["index"] for note in shard.notes if sorted(note.get("kept") or ()) != sorted(keep)]
    if incomplete and keep != (EVERY_FIELD,):  # which fields a row has is then known from the data alone
        says.append(f"samples {Ranges.of(incomplete).text()} do not have the kept fields {', '.join(keep) or '(none)'}")
    return says + (_context(shard) if POSITIONS in shard.header.places and not says else [])


def _context(shard: ShardReader) -> list[str]:
    """Check the positions and the context of a shard in which only some tokens have rows."""
    offsets, starts, context = (shard.read_tensor(name) for name in ("offsets", CONTEXT_OFFSETS, CONTEXT))
    positions, lengths = shard.read_tensor(POSITIONS).astype(np.int64), np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(context) or (lengths < 0).any():
        return ["context_offsets do not rise from 0 to the number of all tokens"]
    sample = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    if (positions < 0).any() or (positions >= lengths[sample]).any():
        return ["positions lie outside their samples"]
    if (np.diff(positions)[np.diff(sample) == 0] <= 0).any():
        return ["positions do not rise within their samples"]
    if not np.array_equal(context[starts[sample] + positions], shard.read_tensor("tokens")):
        return ["tokens are not those of context at positions"]
    return []


def _content(shard: ShardReader, run: RunIdentity, decode: Decode | None) -> list[str]:
    """Check tokens, positions and answers against each other and against the run."""
    wrong = [
        f"{name} has ids outside the vocabulary of {run.vocab_size or 'the model'}"
        for name in ("tokens", CONTEXT)
        if name in shard.header.places and outside_vocabulary(shard.read_tensor(name), run)
    ]
    answers: dict[int, Prediction] = {}
    if run.generation is not None:
        if shard.record.predictions is None:
            return [*wrong, "its commit names no predictions"]
        answers = {answer.sample: answer for answer in read_predictions(shard.folder, shard.record)}
        wrong += answers_problem(shard, answers, run, decode)
    return wrong + (_positions(shard, run, answers) if POSITIONS in shard.header.places else [])


def _positions(shard: ShardReader, run: RunIdentity, answers: Mapping[int, Prediction]) -> list[str]:
    """Check that the rows are at the positions that the run selects.

    Without generated answers, ``answer`` depends on the roles of all tokens, and a shard has only those of rows: each
    row must have the role, and a token without a row is not judged. The same holds for the one row of ``last-content``.
    """
    offsets, starts, positions = (shard.read_tensor(name) for name in ("offsets", CONTEXT_OFFSETS, POSITIONS))
    index, wrong = shard.read_tensor("sample_index").tolist(), []
    by_role = run.positions == ANSWER and run.generation is None
    capture = "both" if run.generation is None else "answer" if run.positions == ANSWER else run.generation.capture
    marked = (shard.read_tensor("roles") & np.uint8(Role.ANSWER | Role.ASSISTANT)) != 0
    for place, sample in enumerate(index):
        rows, length = slice(*offsets[place : place + 2]), int(starts[place + 1] - starts[place])
        if run.positions == LAST_CONTENT:
            right = rows.stop - rows.start == 1
        elif by_role:
            right = bool(marked[rows].all())
        else:
            prompt = length - (len(answers[sample].tokens) if answers else 0)
            first, stop = 0 if capture in ("both", "prompt") else prompt, prompt if capture == "prompt" else length
            roles = np.full(length, Role.ANSWER, np.uint8)
            chosen = choose_positions(run.positions, run.seed, sample, roles, first, stop)
            right = chosen is not None and np.array_equal(positions[rows], chosen)
        if not right:
            wrong.append(sample)
    text = f"samples {Ranges.of(wrong).text()} have rows at other positions than --positions {run.positions} selects"
    return [text] if wrong else []


class _StatisticsCheck:
    """Compares the stored statistics of a tap with its rows, which are added piece by piece."""

    def __init__(self, shard: ShardReader, tap: str) -> None:
        self._stored = TapStatistics.from_json(shard.record.statistics.get(tap))
        self._sums = shard.read_tensor(tap + SUMS)
        self._seen = TapAccumulator(self._sums.shape[1])
        self._listed = [] if self._stored is None else [(_row_of(shard, row), row) for row in self._stored.top]
        self._norms: dict[int, float] = {}

    def add(self, first: int, rows: npt.NDArray[Any]) -> None:
        nothing = np.zeros(len(rows), np.int8)
        self._seen.add(rows, nothing, nothing, nothing)
        for number, _ in self._listed:
            if number is not None and first <= number < first + len(rows):
                self._norms[number] = float(np.linalg.norm(rows[number - first].astype(np.float64)))

    def problem(self) -> str | None:
        """Return what differs, or None. The order of float64 additions may differ, so sums are compared to 1e-9."""
        found, stored = self._seen.result(), self._stored
        if stored is None:
            return "are missing in the commit or malformed"
        size = np.stack([np.sqrt(found.count * found.sums[0][1]), found.sums[0][1]])
        close = np.abs(found.sums[0] - self._sums) <= 1e-9 * size
        if not (close | ~np.isfinite(found.sums[0])).all():
            return "have other sums of columns"
        if (found.count, found.norms) != (stored.count, dict(stored.norms)):
            return "have other counts or norms"
        numbers = [number for number, _ in self._listed]
        if len(set(numbers)) != len(numbers) or len(numbers) != len(found.top):
            return "list other rows with the largest norms"
        norms = [(self._norms.get(-1 if number is None else number, -1.0), row.norm) for number, row in self._listed]
        norms += [(row.norm, listed.norm) for row, (_, listed) in zip(found.top, self._listed, strict=True)]
        if not all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-30) for a, b in norms):
            return "list other rows with the largest norms"
        return None


def _row_of(shard: ShardReader, listed: TopRow) -> int | None:
    """Return the row of the shard that the statistics list, or None if it has no such row with this token."""
    (places,) = np.nonzero(shard.read_tensor("sample_index") == listed.sample)
    if not len(places):
        return None
    start, stop = shard.bounds(int(places[0]))
    (rows,) = np.nonzero(shard.positions(start, stop) == listed.position)
    found = start + int(rows[0]) if len(rows) else None
    return found if found is not None and shard.read_tensor("tokens")[found] == listed.token else None


def _bytes(shard: ShardReader, run: RunIdentity, seen: Callable[[int], None]) -> list[str]:
    """Check every chunk, then derive the checksums of tensors and object from the chunks, so bytes are read once."""
    says: list[str] = []
    sums: list[tuple[int, int]] = [(shard.record.header[1], shard.record.header[0])]
    seen(shard.record.header[0])
    for name, place in shard.header.places.items():
        if name == CHUNKS:
            sums.append((crc32c(shard.read_tensor(name).tobytes()), place.length))
            continue
        bad, first, strange = 0, 0, False
        check = _StatisticsCheck(shard, name) if name + SUMS in shard.header.places else None
        for begin, end in shard.pieces(name, _PIECE):
            data = shard.chunks(name, begin, end)
            if name not in TAIL and place.code in _EXPONENT:
                kind, ones = _EXPONENT[place.code]
                bad += int(np.count_nonzero((np.frombuffer(data, kind) & ones) == ones))
            if check is not None:
                rows = np.frombuffer(data, place.dtype).reshape(-1, place.shape[1])
                check.add(first, shard.decoded(name, first, rows))
                first += len(rows)
            if place.code == "I32" and len(place.shape) == 2 and not name.startswith("pattern_ids"):
                strange |= outside_vocabulary(np.frombuffer(data, "<i4"), run)  # the ids of the largest logits
            seen(len(data))
        if bad:
            says.append(f"{name} has {bad} values that are NaN or infinite")
        if strange:
            says.append(f"{name} has ids outside the vocabulary")
        if check is not None and (differs := check.problem()):
            says.append(f"the stored statistics of {name} {differs}")
        sums.append((shard.tensor_checksum(name), place.length))
        if sums[-1][0] != shard.record.tensors[name]:
            says.append(f"{name}: expected crc32c {to_hex(shard.record.tensors[name])}, found {to_hex(sums[-1][0])}")
    if fold(sums) != shard.record.crc32c:
        says.append(f"the object: expected crc32c {to_hex(shard.record.crc32c)}, found {to_hex(fold(sums))}")
    return says


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
) -> Report:
    """Check every sample, every checksum and every shape of the dataset at ``root``.

    ``streams`` selects streams; None checks all, and reports streams of the split that were never started.
    ``max_samples`` replaces the ``--max-samples`` of the run, whose limits are read from ``spec.json``. ``recompute``
    computes ``k`` random samples again and compares them. ``gc`` searches for garbage older than ``older_than``
    seconds, and ``remove`` removes it. ``repair`` replaces commits of earlier incarnations and keeps copies.
    ``progress`` gets the checked and total bytes.
    ``decode`` returns the text of token ids, to compare the texts of answers; None does not compare them.
    """
    folder = open_folder(root) if isinstance(root, str) else root
    run = read_run(folder)
    if run is None:
        raise UserError(f"no dataset at {folder.url}", expected=f"a folder with {RUN}", found="none")
    there = _folders(folder)
    begun = [number for number in there if streams is None or number in streams]
    with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="ledgers") as pool:
        found = list(pool.map(lambda number: _read(number, folder, run, *there[number]), begun))
    records = [stream.record for stream in found if stream.record is not None]
    never, problems = judge_split(folder.url, begun, records, streams)
    _inspect(found, run, workers or _workers(folder), progress, decode)
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
    progress: Callable[[int, int], None],
    decode: Decode | None,
) -> None:
    ledgers = [ledger for stream in streams for ledger in stream.ledgers]
    total = sum(shard.size for ledger in ledgers for shard in ledger.shards)
    done = 0

    def seen(count: int) -> None:
        nonlocal done
        done += count  # Only a progress bar uses it, so a lost update between threads is harmless.
        progress(done, total)

    def one(task: tuple[_StreamEvidence, StreamRecord, ShardRecord]) -> tuple[_StreamEvidence, list[Problem]]:
        stream, record, shard = task
        return stream, inspect_shard(stream.folder, shard, record, run, seen, decode)

    tasks = [
        (ledger, ledger.record, shard) for ledger in ledgers if ledger.record is not None for shard in ledger.shards
    ]
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        for stream, problems in pool.map(one, tasks):
            stream.problems += problems


def _judge(stream: _StreamEvidence, run: RunIdentity, asked: DataSpec) -> StreamReport:
    """Compare the stream's samples with those that it must have."""
    ledger = Ledger().plus(stream.commits)
    where = stream.folder.url
    identity = None if stream.record is None else stream.record.identity
    total = ledger.end if identity is None or identity.samples is None else identity.samples
    most = None if identity is None else asked.token_limit(row_bytes(identity.rows(run)))
    expected = ledger.expected(total, asked.max_samples, most)
    problems = [problem for each in stream.ledgers for problem in each.problems]
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
        text = f"{len(strange)} of its shards are row for row beside none of the stream's"
        problems.append(Problem("damaged", where, text))
    if any(count > 1 for count in found.values()):
        problems.append(Problem("doubled", where, "rows of one of the stream's shards are there twice"))
    if absent := own.keys() - found.keys():
        text = f"{taps} beside {len(absent)} of {len(own)} shards; spile extract --add-taps {taps} finishes them"
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
