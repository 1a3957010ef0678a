"""Compare the files that may be edited with the create-only records of a dataset, and name what is not compared.

A proof relies on ``run.json``, ``stream.json`` and commits alone. All other files are derived from these records, say
what a worker was asked for or is doing, or do not belong to the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from spile.data.arc.answers import submission_bytes
from spile.data.split import with_share
from spile.errors import Failure, SpecError
from spile.objects.folder import Folder, ObjectInfo, get_if_present
from spile.proof.report import Problem
from spile.spec.identity import RunIdentity
from spile.spec.run import DataSpec, RunSpec
from spile.spec.sample import Prediction
from spile.spec.taps import row_bytes
from spile.store.index import read_group
from spile.store.layout import (
    INDEX,
    METADATA,
    RUN,
    SPEC,
    STREAM,
    SUBMISSION,
    FileKind,
    ListedStream,
    commit_number,
    parse_key,
    stream_number,
)
from spile.store.ledger import Commit, Ledger
from spile.store.predictions import read_all_answers, read_answers
from spile.store.run import spec_differences
from spile.store.stored_stream import CONCURRENT_REQUESTS, Stream
from spile.store.writer import StreamRecord, metadata_bytes, parse_stream

_NAMES = 3
"""Names of a kind that one line lists."""
_UNFINISHED = "the stream is not complete"


class CheckedLedger(NamedTuple):
    """A ledger that could be read."""

    path: str
    folder: Folder
    record: StreamRecord
    commits: tuple[Commit, ...]
    complete: bool
    """Whether it has all samples that it must have."""

    @property
    def total(self) -> int | None:
        """The number of samples of the data, if it is known before all data is read."""
        return self.record.identity.samples


class OtherFiles:
    """The files besides records and shards, noted while the dataset is listed, and what was found about them."""

    def __init__(self, root: Folder, selected: Callable[[int], bool]) -> None:
        self.problems: list[Problem] = []
        self._root, self._selected = root, selected
        self._keys: dict[str, list[str]] = {}
        """The keys of files that are compared with records, by the folder of their ledger (empty for the root)."""
        self._data: list[str] = []
        self._named: dict[str, dict[str, list[str]]] = {}
        """The keys that are not compared: by the reason, and by kind."""

    def noted(self, infos: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Yield the entries of a listing and take note of them."""
        for info in infos:
            self._note(info.key)
            yield info

    def _note(self, key: str) -> None:
        number, file = stream_number(key.partition("/")[0]), parse_key(key)
        if number is not None and not self._selected(number):
            self.name("not selected", "the other streams")
        elif file is None:
            self.name("not a name that spile gives", key)
        elif file.kind is FileKind.DATA:
            self._data.append(key)
        elif file.kind is FileKind.DERIVED or key.startswith(INDEX):
            self._keys.setdefault(file.ledger, []).append(key)
        elif file.kind is FileKind.LOCAL or (file.ledger and file.name != STREAM and commit_number(file.name) is None):
            self.name("for workers and displays", key, file.name.partition("/")[0])

    def name(self, why: str, key: str, kind: str = "") -> None:
        """Name a file that is not compared, and why."""
        kinds = self._named.setdefault(why, {})
        if key not in kinds.setdefault(kind, []):
            kinds[kind].append(key)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What was not compared, in one line for each reason."""
        return tuple(f"{', '.join(map(_listed, kinds.values()))}: {why}" for why, kinds in self._named.items())

    def check(
        self,
        run: RunIdentity,
        ledgers: Sequence[CheckedLedger],
        listed: dict[int, ListedStream],
        *,
        all_streams: bool,
        max_samples: int | None,
    ) -> None:
        """Compare the files with the records.

        Args:
            run: The content of ``run.json``.
            ledgers: The readable ledgers of streams and of added taps.
            listed: The streams in the listing that was noted.
            all_streams: Whether ``ledgers`` has all streams of the dataset.
            max_samples: The number of samples that the user expects of each stream, whatever ``spec.json`` says.
        """
        streams = [ledger for ledger in ledgers if ledger.record.base is None]
        self._check_data(ledgers)
        for key in self._keys.pop("", []):
            if key == SPEC:
                self._check_spec(run, streams, max_samples)
            elif key.startswith(INDEX):
                self._check_index(key, {ledger.record.worker_id: ledger for ledger in streams}, listed)
            elif all_streams and all(ledger.complete for ledger in streams):
                self._compare(key, run, streams)
            else:
                self.name(_UNFINISHED, key)
        known = {ledger.path: ledger for ledger in ledgers}
        tasks = [(key, known.get(path)) for path, keys in self._keys.items() for key in keys]

        def check(task: tuple[str, CheckedLedger | None]) -> None:
            key, ledger = task
            if ledger is None:
                self.name("the records of its stream cannot be read", key)
            elif ledger.complete:
                self._compare(key, run, [ledger])
            else:
                self.name(_UNFINISHED, key, key.rpartition("/")[2])

        with ThreadPoolExecutor(CONCURRENT_REQUESTS, thread_name_prefix="derived") as pool:
            for _ in pool.map(check, tasks):
                pass
        self.problems.sort(key=lambda problem: problem.where)

    def _check_data(self, ledgers: Sequence[CheckedLedger]) -> None:
        """Name the shards and answers that no commit names."""
        shards = [(ledger.path, shard) for ledger in ledgers for commit in ledger.commits for shard in commit.shards]
        committed = {f"{path}/{shard.name}" for path, shard in shards}
        committed |= {f"{path}/{shard.predictions.name}" for path, shard in shards if shard.predictions is not None}
        for key in self._data:
            if key not in committed:
                self.name("no commit that could be read names it (--gc lists what can be removed)", key)

    def _compare(self, key: str, run: RunIdentity, ledgers: Sequence[CheckedLedger]) -> None:
        """Compare a file with the commits of its stream or, in the root, of all streams."""
        name = key.rpartition("/")[2]
        try:
            if name == METADATA:
                (ledger,) = ledgers
                total = Ledger().plus(ledger.commits)
                possible = [metadata_bytes(ledger.record, run, total, each) for each in (None, ledger.commits)]
            else:
                answers = _read_answers(ledgers, merged=key == name)
                possible = [_derive(name, answers, run)]
            content = self._root.get(key)
        except Failure as error:
            self.name(f"it could not be compared: {error}", key)
            return
        if content not in possible:
            text = "differs from what the commits say; the command that made the stream writes it again"
            self.problems.append(Problem("damaged", f"{self._root.url}/{key}", text))

    def _check_spec(self, run: RunIdentity, streams: Sequence[CheckedLedger], max_samples: int | None) -> None:
        """Compare ``spec.json`` with ``run.json``, with the taps of the streams and with the limits that ended them."""
        where = f"{self._root.url}/{SPEC}"
        try:
            spec = RunSpec.from_json(get_if_present(self._root, SPEC) or b"", SPEC)
            nothing = spec.generation is not None and spec.generation.capture == "none"
            taps = () if nothing else spec.selected_taps(run.n_layers)
        except SpecError as error:
            self.problems.append(Problem("damaged", where, str(error)))
            return
        found = [(name, ours, RUN, theirs) for name, theirs, ours in spec_differences(run, spec)]
        # Streams may have different taps: the spec is that of the last command, whose stream may not be selected.
        if (
            streams
            and not self._named.get("not selected")
            and all(taps != each.record.identity.taps for each in streams)
        ):
            own = " ".join(map(str, streams[0].record.identity.taps))
            found.append(("taps", " ".join(map(str, taps)), f"{streams[0].path}/{STREAM}", own))
        for name, ours, record, theirs in found:
            text = f"{name} is {ours}, but {theirs} in {record}"
            self.problems.append(Problem("damaged", where, text))
        if max_samples is None:
            self._check_limits(run, spec, streams)
        self.name(f"compared only where {RUN} and {STREAM} state the same", SPEC)

    def _check_limits(self, run: RunIdentity, spec: RunSpec, streams: Sequence[CheckedLedger]) -> None:
        """Report a stream that ended before the limits that ``spec.json`` asks for now. It never excuses a sample."""
        for ledger in streams:
            held = Ledger().plus(ledger.commits)
            if not ledger.complete or held.limit is None or held.limit.flags == spec.data.limits:
                continue
            data = _data_of_stream(spec.data, ledger.record, streams)
            if data is None:
                continue
            limit = data.token_limit(row_bytes(ledger.record.identity.rows(run)))
            asked = held.expected(ledger.total, data.sample_limit, limit)
            if asked is None or asked > held.limit.samples:
                text = f"it ended with {held.limit.flags}, but {SPEC} asks for {data.limits or 'all samples'}; run the "
                text += "same command again"
                if held.limit.samples:
                    alone = "" if len(streams) == 1 else f"--streams {ledger.record.worker_id} "
                    text += f", or prove what it has with {alone}--max-samples {held.limit.samples}"
                self.problems.append(Problem("missing", ledger.folder.url, text))

    def _check_index(self, key: str, streams: dict[int, CheckedLedger], listed: dict[int, ListedStream]) -> None:
        """Compare the copies that readers would use with the ledgers."""
        where = f"{self._root.url}/{key}"
        try:
            entries = read_group(self._root, key)
            for number, entry in entries.items():
                ledger = streams.get(number)
                if ledger is None or listed[number].digest != entry.digest:
                    continue
                copy = Stream(ledger.folder, ledger.record, entry=entry)
                if parse_stream(entry.stream.encode(), where) != ledger.record or copy.commits != ledger.commits:
                    text = f"its copy of {ledger.path} differs from the ledger; delete it"
                    self.problems.append(Problem("damaged", where, text))
        except Failure as error:
            self.problems.append(Problem("damaged", where, f"{error}; delete it, readers do not need it"))


def _data_of_stream(data: DataSpec, record: StreamRecord, streams: Sequence[CheckedLedger]) -> DataSpec | None:
    """Return the data of a stream with its part of the limits of the run; None if the records do not tell its part."""
    data, identity = replace(data, worker_id=record.worker_id), record.identity
    if data.dataset_dir is None and data.of_streams is None:
        return data
    if identity.streams is None:
        return None if data.max_samples or data.max_tokens or data.max_bytes else data
    known = [each.total for each in streams if each.record.worker_id < record.worker_id]
    before = [total for total in known if total is not None]
    if identity.turn is None and data.max_samples is not None and len(before) < record.worker_id:
        return None
    return with_share(data, identity.streams, turn=identity.turn, before=sum(before))


def _read_answers(ledgers: Sequence[CheckedLedger], *, merged: bool) -> Sequence[tuple[int | None, Prediction]]:
    """Return the answers of a stream or, with the number of the stream of each, those of all streams."""
    if merged:
        return read_all_answers([Stream(ledger.folder, ledger.record) for ledger in ledgers])
    return [(None, answer) for ledger in ledgers for answer in read_answers(ledger.folder, ledger.commits)]


def _derive(name: str, answers: Sequence[tuple[int | None, Prediction]], run: RunIdentity) -> bytes:
    """Return the content that ``predictions.jsonl`` or ``submission.json`` must have."""
    if name == SUBMISSION:
        return submission_bytes([answer for _, answer in answers], run.prompt.encoder)
    return b"".join(answer.line(number) for number, answer in answers)


def _listed(keys: Sequence[str]) -> str:
    more = len(keys) - _NAMES
    return ", ".join(sorted(keys)[:_NAMES]) + (f" and {more} more" if more > 0 else "")
