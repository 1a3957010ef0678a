"""The answers of a shard's samples: a JSONL file whose name and checksum are in the shard's record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spile.errors import Damaged, untrusted
from spile.objects.crc import crc32c, to_hex
from spile.objects.folder import Folder
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import GenerationSpec
from spile.spec.sample import Prediction, Role
from spile.store.layout import predictions_name
from spile.store.ledger import Commit, PredictionsRecord, ShardRecord
from spile.store.shard import POSITIONS
from spile.store.shard_reader import ShardReader

if TYPE_CHECKING:
    from spile.store.stored_stream import Stream

_MAX_LOGPROB = 1e-3
"""A log-probability is at most 0, plus rounding."""


def put_predictions(folder: Folder, record: ShardRecord, predictions: Sequence[Prediction]) -> ShardRecord:
    """Store the answers of a shard that is not committed yet, and return its record with them."""
    data = b"".join(prediction.line() for prediction in predictions)
    name = predictions_name(record.name)
    folder.put(name, data)
    return replace(record, predictions=PredictionsRecord(name, len(data), crc32c(data), len(predictions)))


def read_predictions(folder: Folder, record: ShardRecord) -> list[Prediction]:
    """Read a shard's answers and check them against its record: the checksum, and one line for each sample."""
    named = record.predictions
    if named is None:
        return []
    where = f"{folder.url}/{named.name}"
    data = folder.get(named.name)
    if (len(data), crc32c(data)) != (named.size, named.crc32c):
        raise Damaged(
            f"{where} is damaged",
            expected=f"{named.size} bytes with crc32c {to_hex(named.crc32c)}",
            found=f"{len(data)} bytes with {to_hex(crc32c(data))}",
        )
    with untrusted(Damaged, f"{where} has a line that is not a prediction"):
        predictions = [Prediction.from_line(line) for line in data.splitlines()]
    samples = Ranges.of(prediction.sample for prediction in predictions)
    if len(predictions) != named.count or named.count != record.count or samples != record.samples:
        raise Damaged(f"{where} has answers to other samples than its shard", expected=record.samples.text())
    return predictions


Decode = Callable[[Sequence[int]], str]
"""Return the text of token ids."""


def find_answer_problems(
    shard: ShardReader, predictions: Mapping[int, Prediction], run: RunIdentity, decode: Decode | None = None
) -> list[str]:
    """Return the problems of a shard's answers: of each answer alone, and compared with the sample's tokens and note.

    Texts are compared only if ``decode`` is given.
    """
    generation = run.generation or GenerationSpec()
    captured = generation.capture in ("both", "answer")
    some = POSITIONS in shard.header.places  # Then the context contains all tokens and ends with the answer.
    tokens, roles = shard.read_tensor("tokens"), shard.read_tensor("roles")
    wrong = []
    for place, (index, note) in enumerate(zip(shard.read_tensor("sample_index").tolist(), shard.notes, strict=True)):
        rows, answer = slice(*shard.bounds(place)), predictions[index]
        answered = tokens[rows][(roles[rows] & np.uint8(Role.ANSWER)) != 0]
        answered = shard.context(place)[-len(answer.tokens) :] if some else answered
        if tuple(answered.tolist()) != (answer.tokens if captured or some else ()):
            wrong.append(f"the rows of sample {index} are not those of its answer")
        if (answer.task_id, answer.augmentation) != (note["task_id"], note.get("augmentation")):
            wrong.append(
                f"the answer of sample {index} has the task id {answer.task_id!r}, expected {note['task_id']!r}"
            )
        wrong += [f"the answer of sample {index} {why}" for why in _contradictions(answer, generation, run, decode)]
    return wrong


def _contradictions(
    answer: Prediction, generation: GenerationSpec, run: RunIdentity, decode: Decode | None
) -> Iterator[str]:
    """Yield how an answer contradicts itself or the settings of the run."""
    ended = [place for place, token in enumerate(answer.tokens) if token in generation.stop_tokens]
    last = len(answer.tokens) - 1
    if answer.stop_reason == "stop" and ended != [last]:
        yield "ends with stop, but a stop token is not its last token, or not only"
    if answer.stop_reason == "length" and (ended or len(answer.tokens) != generation.max_new_tokens):
        yield f"ends with length, but has {len(answer.tokens)} tokens of {generation.max_new_tokens}, or a stop token"
    if not all(-math.inf < each <= _MAX_LOGPROB for each in answer.logprobs):
        yield "has a log-probability above 0 or not a number"
    if outside_vocabulary(np.array(answer.tokens, np.int64), run):
        yield "has token ids outside the vocabulary"
    elif decode is not None:
        kept = answer.tokens[:-1] if answer.stop_reason == "stop" else answer.tokens
        if decode(kept) != answer.text:
            yield "has a text that is not that of its tokens"


def outside_vocabulary(ids: npt.NDArray[Any], run: RunIdentity) -> bool:
    """Return whether any token id is negative, or too large if the run states the size of the vocabulary.

    Imported pickles have no token ids; -1 is stored for each.
    """
    least = -1 if run.weights.startswith("imported: ") else 0
    return bool(len(ids)) and bool(ids.min() < least or (run.vocab_size is not None and ids.max() >= run.vocab_size))


def read_answers(folder: Folder, commits: Iterable[Commit]) -> list[Prediction]:
    """Return all answers of these commits, in the order of their samples."""
    shards = [shard for commit in commits for shard in commit.shards]
    found = [prediction for shard in shards for prediction in read_predictions(folder, shard)]
    return sorted(found, key=lambda prediction: prediction.sample)


def read_all_answers(streams: Iterable[Stream]) -> list[tuple[int, Prediction]]:
    """Return the answers of several streams in the order of the data, each with the number of its stream."""
    found = [
        (stream.key(answer.sample), stream.number, answer)
        for stream in streams
        for answer in read_answers(stream.folder, stream.commits)
    ]
    return [(number, answer) for _, number, answer in sorted(found, key=itemgetter(0))]
