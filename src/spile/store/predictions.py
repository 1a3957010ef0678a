"""The answers beside a shard: a file of lines, one per sample, named with its checksum in the same record."""

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

__all__ = ["answers_problem", "merged", "put_predictions", "read_predictions"]


def put_predictions(folder: Folder, record: ShardRecord, predictions: Sequence[Prediction]) -> ShardRecord:
    """Store a shard's answers durably, and give its record with them; no commit has named it yet."""
    data = b"".join(prediction.line() for prediction in predictions)
    name = predictions_name(record.name)
    folder.put(name, data)
    return replace(record, predictions=PredictionsRecord(name, len(data), crc32c(data), len(predictions)))


def read_predictions(folder: Folder, record: ShardRecord) -> list[Prediction]:
    """A shard's answers, checked against its record: every byte, and one line for each of its samples."""
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
    with untrusted(Damaged, f"{where} has a line that is no prediction"):
        predictions = [Prediction.from_line(line) for line in data.splitlines()]
    samples = Ranges.of(prediction.sample for prediction in predictions)
    if len(predictions) != named.count or named.count != record.count or samples != record.samples:
        raise Damaged(f"{where} answers other samples than its shard holds", expected=record.samples.text())
    return predictions


def answers_problem(folder: Folder, shard: ShardReader) -> list[str]:
    """What is wrong with a shard's answers: their file, and whether the rows are those of the tokens that they name."""
    predictions = {prediction.sample: prediction for prediction in read_predictions(folder, shard.record)}
    some = POSITIONS in shard.header.places  # then all tokens are there, the answer's last
    tokens, roles = shard.whole("tokens"), shard.whole("roles")
    wrong = []
    for place, index in enumerate(shard.whole("sample_index").tolist()):
        rows, said = slice(*shard.bounds(place)), predictions[index].tokens if index in predictions else ()
        answered = tokens[rows][(roles[rows] & np.uint8(Role.ANSWER)) != 0]
        answered = shard.context(place)[-len(said) :] if some else answered
        if index not in predictions or (len(answered) and tuple(answered.tolist()) != said):
            wrong.append(f"the rows of sample {index} are not those of its answer")
    return wrong


def merged(folder: Folder, commits: Iterable[Commit]) -> list[Prediction]:
    """All answers that these commits made part of the dataset, in the order of their samples."""
    shards = [shard for commit in commits for shard in commit.shards]
    found = [prediction for shard in shards for prediction in read_predictions(folder, shard)]
    return sorted(found, key=lambda prediction: prediction.sample)
