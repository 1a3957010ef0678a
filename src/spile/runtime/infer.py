"""``spile.infer``: prompts in, answers and their activations out, by the same visits as ``spile.extract``."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp

from spile.data.arc.answers import by_task, submission
from spile.data.arc.encoders import parse_encoder
from spile.data.stream import SampleReader
from spile.errors import SpecError
from spile.model.decoder import head_needed
from spile.model.generation import slot_bytes
from spile.objects import open_folder
from spile.runtime.extract import stream_end, visit
from spile.runtime.generator import Generator
from spile.runtime.mesh import default_shape, device_memory, make_mesh, plan_mesh
from spile.runtime.parts import Parts, bytes_per_token
from spile.runtime.pod.group import WorkerGroup
from spile.runtime.progress import Progress
from spile.runtime.shelf import Shelf
from spile.runtime.sizing import host_memory
from spile.runtime.slots import plan_slots
from spile.runtime.summary import Summary
from spile.runtime.visiting import Visit, VisitKind
from spile.spec.phase import Phase
from spile.spec.positions import ANSWER
from spile.spec.run import ExtractSpec, GenerationSpec
from spile.spec.sample import Sample, Skip
from spile.spec.sites import MODULE
from spile.spec.taps import Tap
from spile.store.layout import PREDICTIONS, SUBMISSION
from spile.store.ledger import read_commits
from spile.store.predictions import merged
from spile.store.stream import StreamStore
from spile.weights.loading import load

__all__ = ["infer"]

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
    strange = [site for site in spec.sites if site.startswith(MODULE) or head_needed((Tap(site),))]
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
