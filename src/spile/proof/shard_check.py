"""The checks of one shard: its bytes, shapes, indices, statistics and content."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import Damaged, Failure
from spile.objects.crc import combine_all, crc32c, to_hex
from spile.objects.folder import Folder, NotFound
from spile.proof.report import Problem
from spile.spec.identity import RunIdentity
from spile.spec.positions import ANSWER, LAST_CONTENT, choose_positions
from spile.spec.ranges import Ranges
from spile.spec.run import EVERY_FIELD
from spile.spec.safetensors import DTYPES
from spile.spec.sample import Prediction, Role
from spile.spec.taps import STORED_TYPES
from spile.store.ledger import ShardRecord
from spile.store.predictions import Decode, find_answer_problems, outside_vocabulary, read_predictions
from spile.store.shard import CHUNKS, CONTEXT, CONTEXT_OFFSETS, POSITIONS, TAIL, ShardSchema, count_cut
from spile.store.shard_reader import ShardReader
from spile.store.statistics import SUMS, TapAccumulator, TapStatistics, TopRow
from spile.store.writer import StreamRecord

_PIECE = 8 << 20
"""Bytes that are read at once, in whole chunks, at least one chunk."""
_INFINITY = {
    code: np.array(np.inf, np.float32).astype(DTYPES[code]).view(f"u{size}") & (1 << 8 * size - 1) - 1
    for code, size, _ in STORED_TYPES.values()
    if DTYPES[code].kind != "i"
}
"""The bits of infinity: a value that has them all is infinite or NaN. float8 has no infinity; this is its NaN."""


def check_shard(
    folder: Folder,
    record: ShardRecord,
    stream: StreamRecord,
    run: RunIdentity,
    count_bytes: Callable[[int], None] = lambda _: None,
    decode: Decode | None = None,
) -> list[Problem]:
    """Return the problems of a shard. ``count_bytes`` is called with the number of bytes after each read.

    ``decode`` returns the text of token ids; None does not compare the texts of answers.
    """
    schema = replace(stream.schema(run), fingerprint=run.fingerprint())
    where = f"{folder.url}/{record.name}"
    try:
        size = folder.info(record.name).size
        if size != record.size:
            raise Damaged(f"{where} has the wrong size", expected=f"{record.size} bytes", found=size)
        shard = ShardReader(folder, record)
        wrong = _check_header(shard, schema) or _check_index(shard, schema.keep)
        sound = not wrong
        wrong += _check_bytes(shard, run, count_bytes)
        if sound and stream.base is None:  # Added taps have the tokens of the stream, compared by their checksums.
            wrong += _check_content(shard, stream, run, decode)
    except NotFound:
        wrong = ["the shard, or its answers, are gone" if record.predictions else "the shard is gone"]
    except Failure as error:
        wrong = [str(error).removeprefix(f"{where} ")]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        # The checksums match but the content is invalid: the writer was faulty. Report it and check the other shards.
        wrong = [f"its content is invalid: {type(error).__name__}: {error}"]
    return [Problem("damaged", where, text) for text in wrong]


def _check_header(shard: ShardReader, schema: ShardSchema) -> list[str]:
    header, record = shard.header, shard.record
    schema = replace(schema, statistics=any(name.endswith(SUMS) for name in header.places))  # optional
    context = header.places[CONTEXT].shape[0] if CONTEXT in header.places else 0  # _check_index checks the value
    found = {name: (place.code, place.shape) for name, place in header.places.items()}
    shapes = {**schema.tensors(record.count, record.tokens, context), CHUNKS: found[CHUNKS]}
    wanted = schema.metadata()
    problems = [
        f"the header says {name} {header.metadata.get(name)}, expected {value}"
        for name, value in wanted.items()
        if header.metadata.get(name) != value
    ]
    if list(found) != list(shapes):
        problems.append(f"it has the tensors {', '.join(found)}, expected {', '.join(shapes)}")
    else:
        problems += [
            f"{name} is {found[name][0]} {list(found[name][1])}, expected {kind} {list(shape)}"
            for name, (kind, shape) in shapes.items()
            if found[name] != (kind, shape)
        ]
    if set(record.tensors) != set(header.places):
        problems.append("the commit has checksums of other tensors")
    if any(tap + SUMS not in header.places for tap in record.statistics):
        problems.append("the commit has statistics of taps whose sums the shard does not have")
    return problems


def _check_index(shard: ShardReader, keep: tuple[str, ...]) -> list[str]:
    offsets, index = shard.read_tensor("offsets"), shard.read_tensor("sample_index")
    problems = []
    if offsets[0] != 0 or offsets[-1] != shard.record.tokens or (np.diff(offsets) < 0).any():
        problems.append("offsets do not rise from 0 to the number of tokens")
    if len(np.unique(index)) != len(index) or Ranges.of(index.tolist()) != shard.record.samples:
        problems.append("sample_index is not the commit's samples")
    if [note.get("index") for note in shard.notes] != index.tolist():
        problems.append("the header's samples are not those of sample_index")
    if (cut := count_cut(shard.notes)) != shard.record.cut:
        problems.append(f"the commit counts {shard.record.cut} cut samples, the header {cut}")
    incomplete = [note["index"] for note in shard.notes if sorted(note.get("kept") or ()) != sorted(keep)]
    if incomplete and keep != (EVERY_FIELD,):  # which fields a row has is then known from the data alone
        problems.append(
            f"samples {Ranges.of(incomplete).text()} do not have the kept fields {', '.join(keep) or '(none)'}"
        )
    return problems + (_check_context(shard) if POSITIONS in shard.header.places and not problems else [])


def _check_context(shard: ShardReader) -> list[str]:
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


def _check_content(shard: ShardReader, stream: StreamRecord, run: RunIdentity, decode: Decode | None) -> list[str]:
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
        wrong += find_answer_problems(shard, answers, run, decode)
    return wrong + (_check_positions(shard, stream, run, answers) if POSITIONS in shard.header.places else [])


def _check_positions(
    shard: ShardReader, stream: StreamRecord, run: RunIdentity, answers: Mapping[int, Prediction]
) -> list[str]:
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
            number = stream.identity.place(stream.worker_id, sample)
            chosen = choose_positions(run.positions, run.seed, number, roles, first, stop)
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


def _check_bytes(shard: ShardReader, run: RunIdentity, count_bytes: Callable[[int], None]) -> list[str]:
    """Check every chunk, then derive the checksums of tensors and object from the chunks, so bytes are read once."""
    problems: list[str] = []
    sums: list[tuple[int, int]] = [(shard.record.header[1], shard.record.header[0])]
    count_bytes(shard.record.header[0])
    for name, place in shard.header.places.items():
        if name == CHUNKS:
            sums.append((crc32c(shard.read_tensor(name).tobytes()), place.length))
            continue
        bad, first, strange = 0, 0, False
        check = _StatisticsCheck(shard, name) if name + SUMS in shard.header.places else None
        for begin, end in shard.pieces(name, _PIECE):
            data = shard.chunks(name, begin, end)
            if name not in TAIL and (ones := _INFINITY.get(place.code)) is not None:
                bad += int(np.count_nonzero((np.frombuffer(data, ones.dtype) & ones) == ones))
            if check is not None:
                rows = np.frombuffer(data, place.dtype).reshape(-1, place.shape[1])
                check.add(first, shard.decoded(name, first, rows))
                first += len(rows)
            if place.code == "I32" and len(place.shape) == 2 and not name.startswith("pattern_ids"):
                strange |= outside_vocabulary(np.frombuffer(data, "<i4"), run)  # the ids of the largest logits
            count_bytes(len(data))
        if bad:
            problems.append(f"{name} has {bad} values that are NaN or infinite")
        if strange:
            problems.append(f"{name} has ids outside the vocabulary")
        if check is not None and (differs := check.problem()):
            problems.append(f"the stored statistics of {name} {differs}")
        sums.append((shard.tensor_checksum(name), place.length))
        if sums[-1][0] != shard.record.tensors[name]:
            problems.append(
                f"{name}: expected crc32c {to_hex(shard.record.tensors[name])}, found {to_hex(sums[-1][0])}"
            )
    if combine_all(sums) != shard.record.crc32c:
        problems.append(f"the object: expected crc32c {to_hex(shard.record.crc32c)}, found {to_hex(combine_all(sums))}")
    return problems
