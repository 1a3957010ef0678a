"""Finished answers until they are a shard's worth; written and committed beside the loop, one shard at a time."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from spile.data.arc.answers import by_task, submission
from spile.data.arc.encoders import parse_encoder
from spile.data.stream import SampleReader
from spile.data.tokens import Tokenizer
from spile.errors import SpecError
from spile.models.decoder import head_needed
from spile.models.generation import slot_bytes
from spile.models.weights import load
from spile.objects import open_folder
from spile.objects.folder import Folder
from spile.spec.phase import Phase
from spile.spec.positions import ALL, ANSWER, choose_positions
from spile.spec.run import Capture, ExtractSpec, GenerationSpec
from spile.spec.sample import Prediction, Role, Sample, Skip
from spile.spec.taps import MODULE, Tap, tap_kinds
from spile.store.layout import PREDICTIONS, SUBMISSION
from spile.store.ledger import ShardRecord, read_commits
from spile.store.predictions import merged, put_predictions
from spile.store.stream import StreamStore
from spile.worker.extract import Visit, VisitKind, stream_end, visit
from spile.worker.generator import Answer, Generator, plan_slots, tokens_kept
from spile.worker.mesh import default_shape, device_memory, make_mesh, plan_mesh
from spile.worker.parts import Parts, bytes_per_token
from spile.worker.pipeline import Sink
from spile.worker.pod.group import WorkerGroup
from spile.worker.progress import Progress, Summary
from spile.worker.sizing import host_memory

__all__ = [
    "Shelf",
    "infer",
]


_MOST = 16_384
"""Samples of a shard, and skipped ones that are held, at most."""


class Shelf:
    """What was answered and is not committed yet. On a pod every process holds the same answers, and its own rows."""

    def __init__(
        self,
        folder: Folder,
        sink: Sink,
        tokenizer: Tokenizer,
        progress: Progress,
        *,
        capture: Capture,
        positions: str = ALL,
        seed: int = 0,
        bytes_per_token: int,
        shard_bytes: float,
        lanes: int = 1,
    ) -> None:
        self._folder, self._sink, self._tokenizer, self._progress = folder, sink, tokenizer, progress
        self._capture, self._positions, self._seed = capture, positions, seed
        self._bytes_per_token, self._shard_bytes = bytes_per_token, shard_bytes
        self._answers: list[Answer] = []
        self._skipped: list[Skip] = []
        self._bytes = 0
        self._writer, self._lanes = ThreadPoolExecutor(lanes, "spile-writer"), lanes
        self._handed: deque[Future[None]] = deque()

    def add(self, answers: Sequence[Answer]) -> None:
        """They have ended."""
        for answer in answers:
            self._bytes += self._bytes_of(answer)
            self._answers.append(answer)
            self._progress.add(samples=1, tokens=len(answer.sample) + len(answer.tokens))

    def skip(self, skip: Skip) -> None:
        """A sample that is done without an answer."""
        self._skipped.append(skip)

    @property
    def empty(self) -> bool:
        """Nothing waits for a commit."""
        return not self._answers and not self._skipped

    @property
    def full(self) -> bool:
        """A shard's worth is here."""
        return self._bytes >= self._shard_bytes or max(len(self._answers), len(self._skipped)) >= _MOST

    def commit(self, end: int | None = None) -> None:
        """Write and commit what is here, behind the caller's back. Waits while every lane is at work.

        There are several where a device is faster than one file, and one on a pod, whose hosts commit together. Very
        many answers may have ended at once: they are several shards, and several lanes' work.
        """
        *first, last = self._shards()
        skipped = tuple(self._skipped)
        self._answers, self._skipped, self._bytes = [], [], 0
        for answers in first:
            self._hand_over(answers, (), None)
        if end is not None:
            self.wait()  # the end is the last word
        self._hand_over(last, skipped, end)

    def _shards(self) -> list[list[Answer]]:
        """What is here by its number, in parts of about a shard's bytes; at least one, which may be empty."""
        answers = sorted(self._answers, key=lambda answer: answer.sample.index)
        count = max(1, round(self._bytes / self._shard_bytes), -(-len(answers) // _MOST))
        parts: list[list[Answer]] = [[] for _ in range(count)]
        sofar = 0
        for answer in answers:
            parts[min(count - 1, sofar * count // max(1, self._bytes))].append(answer)
            sofar += self._bytes_of(answer)
        return [part for part in parts if part] or [[]]

    def _hand_over(self, answers: Sequence[Answer], skipped: tuple[Skip, ...], end: int | None) -> None:
        while len(self._handed) >= self._lanes:
            self._handed.popleft().result()
        self._handed.append(self._writer.submit(self._store, answers, skipped, end))

    def wait(self) -> None:
        """Until what was handed over is committed, or its error."""
        while self._handed:
            self._handed.popleft().result()

    def close(self) -> None:
        """No more comes."""
        self._writer.shutdown(wait=True)

    def _bytes_of(self, answer: Answer) -> int:
        tokens = tokens_kept(self._capture, len(answer.sample), len(answer.tokens))
        return tokens * self._bytes_per_token + 8 * len(answer.tokens)

    def _store(self, answers: Sequence[Answer], skipped: tuple[Skip, ...], end: int | None) -> None:
        with self._progress.busy("sink"):
            own = [answer for answer in answers if answer.owned]
            record = self._shard(own) if own else None
            self._sink.commit(record, skipped, end)
        self._progress.add(shards_committed=int(record is not None), samples_committed=len(answers) + len(skipped))
        for skip in skipped:
            self._progress.skip(skip.reason)

    def _shard(self, answers: Sequence[Answer]) -> ShardRecord:
        samples = [self._sample(answer) for answer in answers]
        builder = self._sink.begin(samples)
        try:
            for tap in range(answers[0].rows.taps):
                row = 0
                for answer, sample in zip(answers, samples, strict=True):
                    rows = self._wanted(answer, sample, answer.rows.taken(tap))
                    if rows is not None:
                        builder.write(tap, row, rows)
                        row += len(rows)
            record = builder.finish()
        except BaseException:
            builder.abort()
            raise
        record = put_predictions(self._folder, record, [self._prediction(answer) for answer in answers])
        self._progress.add(shards_written=1, bytes=record.size)
        return record

    def _sample(self, answer: Answer) -> Sample:
        """The sample as it is stored: the tokens whose rows are kept, the answer's marked."""
        sample = answer.sample
        tokens = np.array(answer.tokens, np.int32)
        roles = (self._tokenizer.roles(tokens) & ~np.uint8(Role.FIRST)) | np.uint8(Role.ANSWER | Role.ASSISTANT)
        if self._positions != ALL:
            return self._with_positions(sample, tokens, roles)
        parts = {"prompt": (sample.tokens, sample.roles), "answer": (tokens, roles)}
        kept = [part for name, part in parts.items() if self._capture in (name, "both")]
        if not kept:
            return replace(sample, tokens=sample.tokens[:0], roles=sample.roles[:0])
        return replace(
            sample, tokens=np.concatenate([part[0] for part in kept]), roles=np.concatenate([part[1] for part in kept])
        )

    def _with_positions(self, sample: Sample, tokens: npt.NDArray[Any], roles: npt.NDArray[Any]) -> Sample:
        """All tokens, and which of those whose rows were captured are stored."""
        first, stop = self._captured(len(sample), len(tokens))
        roles = np.concatenate([sample.roles, roles])
        positions = choose_positions(self._positions, self._seed, sample.index, roles, first, stop)
        return replace(sample, tokens=np.concatenate([sample.tokens, tokens]), roles=roles, positions=positions)

    def _captured(self, prompt: int, answer: int) -> tuple[int, int]:
        first = 0 if self._capture in ("prompt", "both") else prompt
        return first, prompt + (answer if self._capture in ("answer", "both") else 0)

    def _wanted(self, answer: Answer, sample: Sample, rows: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        """Of the rows that were captured, those that are stored."""
        if rows is None or sample.positions is None:
            return rows
        first, _ = self._captured(len(answer.sample), len(answer.tokens))
        return rows[sample.positions - first]

    def _prediction(self, answer: Answer) -> Prediction:
        assert answer.reason is not None  # noqa: S101 - it has ended
        said = answer.tokens[:-1] if answer.reason == "stop" else answer.tokens
        return Prediction(
            sample=answer.sample.index,
            task_id=answer.sample.task_id,
            text=self._tokenizer.decode(said),
            tokens=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            stop_reason=answer.reason,
            augmentation=answer.sample.augmentation,
        )


_MEMORY_SHARE = 4
"""Shards wait in memory until their last answer is made: at most one part in so many of the host's."""
_MOST_LANES = 8


def infer(
    spec: ExtractSpec,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
) -> Summary:
    """Answer every prompt of a stream, and store answers and activations; what an earlier visit committed stays.

    ``spec.generation`` says how. ``hosts``: the pod that this process is part of.
    """
    if spec.generation is None:
        raise SpecError("infer", expected="a spec with generation settings", found="none")
    if spec.data.prompt.pack:
        raise SpecError("--pack", expected="prompts, each a sample", found="documents in windows")
    strange = [site for site in tap_kinds(spec.taps) if site.startswith(MODULE) or head_needed((Tap(site),))]
    if strange:
        raise SpecError(
            "--taps",
            expected="what a layer or the embedding shows, where answers are made",
            found=", ".join(strange),
            fix="predictions.jsonl has the log-probability of each token",
        )
    return visit(spec, _INFER, progress=progress, stop=stop, hosts=hosts)


def _make_generator(parts: Parts, progress: Progress, _reader: SampleReader) -> Generator:
    """The model on all devices, its cache's memory planned before it is asked for."""
    spec, config, dtype = parts.spec, parts.files.config, parts.spec.dtype
    generation = _generation(parts)
    itemsize, memory = jnp.dtype(dtype).itemsize, device_memory()
    shape = spec.mesh_shape or default_shape(config, jax.device_count(), itemsize, memory)
    mesh, lying = make_mesh(shape), plan_mesh(config, shape)
    for note in lying.notes(config):
        progress.log(note)
    split = shape[1] if config.n_kv_heads % shape[1] == 0 else 1
    plan = plan_slots(
        spec.data.max_seq_length,
        generation.max_new_tokens,
        -(-slot_bytes(config, 1, dtype) // split),
        lying.weight_bytes(config, itemsize, head=True),
        memory,
        spec.batch_size,
    )
    return Generator(
        load(parts.files, dtype, None, lying.place(mesh), head=True),
        config,
        parts.taps,
        mesh=mesh,
        plan=plan,
        stop=generation.stop_tokens,
        generation=generation,
        seed=spec.data.seed,
        dtype=dtype,
        store_dtype=spec.store_dtype,
        progress=progress,
    )


def _generation(parts: Parts) -> GenerationSpec:
    """How answers are made, and whose rows leave the device: of prompts none, where only answers' are stored."""
    generation = parts.identity.generation
    assert generation is not None  # noqa: S101 - infer refuses a spec without
    return replace(generation, capture="answer") if parts.spec.positions == ANSWER else generation


def _answer(visit: Visit, generator: Generator) -> bool:
    """Work off what is left. True: to the end; False: told to stop, every answer that had ended committed."""
    parts, stream, progress = visit.parts, visit.stream, visit.status.progress
    control = visit.control()
    processes = jax.process_count()
    lanes = 1 if processes > 1 else max(1, min(_MOST_LANES, (os.cpu_count() or 2) // 2))
    shelf = Shelf(
        stream.folder,
        visit.sink(),
        parts.tokenizer,
        progress,
        capture=_generation(parts).capture,
        positions=parts.spec.positions,
        seed=parts.spec.data.seed,
        bytes_per_token=bytes_per_token(parts),
        shard_bytes=min(parts.spec.shard_size_gb * 1e9, host_memory() / _MEMORY_SHARE / (lanes + 1)) * processes,
        lanes=lanes,
    )

    def samples() -> Iterator[Sample]:
        for item in visit.reader:
            if isinstance(item, Skip):
                shelf.skip(item)
            else:
                yield item

    finished = True
    with closing(shelf):
        for ended in generator.answers(samples()):
            shelf.add(ended)
            verdict = control.verdict()
            if verdict == "stop":
                finished = False
                break
            if shelf.full or (verdict == "commit" and not shelf.empty):
                shelf.commit()
                control.committed()
        progress.phase(Phase.UPLOADING)
        end = stream_end(parts, stream, visit.reader) if finished else None
        if not shelf.empty or end is not None:
            shelf.commit(end)
        shelf.wait()
    return finished


def _write_answers(parts: Parts, stream: StreamStore) -> None:
    """All answers in one file, and for ARC tasks the challenge's form: from the commits, so each of them once."""
    folder = stream.folder if parts.spec.answers_dir is None else open_folder(parts.spec.answers_dir)
    predictions = merged(stream.folder, read_commits(stream.folder, stream.record.id))
    folder.put(PREDICTIONS, b"".join(prediction.line() for prediction in predictions))
    prompt = parts.identity.prompt
    if prompt.kind == "arc" and prompt.version.startswith("output-from-examples"):
        answers = by_task(predictions, parse_encoder(prompt.encoder))
        made = json.dumps(submission(answers.values()), separators=(",", ":")).encode() + b"\n"
        folder.put(SUBMISSION, made)


_INFER = VisitKind(_make_generator, _answer, _write_answers)
