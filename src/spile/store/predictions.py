"""The answers of a shard's samples: a JSONL file whose name and checksum are in the shard's record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from spile.errors import Damaged, untrusted
from spile.objects.crc import crc32c, to_hex
from spile.objects.folder import Folder
from spile.spec.ranges import Ranges
from spile.spec.sample import Prediction, Role
from spile.store.layout import predictions_name
from spile.store.ledger import Commit, PredictionsRecord, ShardRecord
from spile.store.shard_format import POSITIONS
from spile.store.shard_reader import ShardReader


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


def answers_problem(folder: Folder, shard: ShardReader) -> list[str]:
    """Return the problems of a shard's answers, including rows that do not belong to the tokens of the answers."""
    predictions = {prediction.sample: prediction for prediction in read_predictions(folder, shard.record)}
    some = POSITIONS in shard.header.places  # Then the context contains all tokens and ends with the answer.
    tokens, roles = shard.read_tensor("tokens"), shard.read_tensor("roles")
    wrong = []
    for place, index in enumerate(shard.read_tensor("sample_index").tolist()):
        rows, answer = slice(*shard.bounds(place)), predictions[index].tokens if index in predictions else ()
        answered = tokens[rows][(roles[rows] & np.uint8(Role.ANSWER)) != 0]
        answered = shard.context(place)[-len(answer) :] if some else answered
        if index not in predictions or (len(answered) and tuple(answered.tolist()) != answer):
            wrong.append(f"the rows of sample {index} are not those of its answer")
    return wrong


def merged(folder: Folder, commits: Iterable[Commit]) -> list[Prediction]:
    """Return all answers of these commits, in the order of their samples."""
    shards = [shard for commit in commits for shard in commit.shards]
    found = [prediction for shard in shards for prediction in read_predictions(folder, shard)]
    return sorted(found, key=lambda prediction: prediction.sample)
