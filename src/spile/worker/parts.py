"""Which tokens end an answer: the model's own, and those that a user names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import Literal, TypeVar

import jax

from spile.data.stream import SampleStream, open_stream
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import ModelError, RunMismatch, SpecError, untrusted
from spile.models import model_files
from spile.models.adapters import find_adapter
from spile.models.families import FAMILIES
from spile.models.model_files import GENERATION
from spile.objects import open_folder
from spile.objects.folder import Folder
from spile.objects.mirror import MirrorFolder
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec, GenerationSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap, TapRows, select_taps, tap_rows
from spile.store.stream import join_run, read_run
from spile.worker.batches import row_bytes
from spile.worker.producer import check_tokens, refuse_no_answers
from spile.worker.progress import Progress, Timeline
from spile.worker.sizing import choose_sizes
from spile.worker.torch_backend import TorchProducer, installed, load_model, torch_device, torch_rows
from spile.worker.worker import Sizes

__all__ = [
    "Parts",
    "bytes_per_token",
    "compute_dtype_for",
    "compute_platform",
    "find",
    "find_model",
    "rows_of",
    "sizes_for",
    "torch_producer",
    "wants_statistics",
    "with_stops",
]


def with_stops(generation: GenerationSpec, files: model_files.ModelFiles, tokenizer: Tokenizer) -> GenerationSpec:
    """The settings with every stop token as its number; an error where there is none: each answer would run on."""
    tokens = {*_own(files, tokenizer), *(_number(text, tokenizer) for text in generation.stop)}
    if not tokens:
        raise ModelError(
            f"{files.name} names no token that ends an answer",
            expected="eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
            found="neither",
            fix="name one with --stop, such as --stop '<|im_end|>'",
        )
    return replace(generation, stop_tokens=tuple(sorted(tokens)))


def _own(files: model_files.ModelFiles, tokenizer: Tokenizer) -> set[int]:
    found = set() if tokenizer.eos is None else {tokenizer.eos}
    file = files.tokenizer_folder / GENERATION
    if file.is_file():
        with untrusted(ModelError, f"{GENERATION} of {files.name} cannot be read", fix="download the model again"):
            named = dict(json.loads(file.read_bytes())).get("eos_token_id")
        found |= {token for token in (named if isinstance(named, list) else [named]) if type(token) is int}
    return found


def _number(text: str, tokenizer: Tokenizer) -> int:
    known: int | None = tokenizer.backend.token_to_id(text)
    if known is not None:
        return known
    made = tokenizer.encode([text], add_special=False)[0].tokens
    if len(made) != 1:
        raise SpecError("--stop", expected="the text of one token", found=f"{text!r}, which is {len(made)} tokens")
    return int(made[0])


def find_model(
    spec: ExtractSpec, known: RunIdentity | None, url: str
) -> tuple[model_files.ModelFiles, Literal["jax", "torch"]]:
    """The model's files and the backend that runs it.

    A run that is there keeps its backend unless the user declares the other one's numbers equal.
    """
    began = None if known is None else known.backend
    backend = spec.backend if spec.backend != "auto" else began
    if began is not None and backend != began and not spec.same_numbers:
        raise RunMismatch(
            f"{url} was begun with --backend {began}",
            expected=f"--backend {began}",
            found=f"--backend {backend}",
            fix="leave --backend out, or declare both's numbers equal with --same-numbers, or give another --output",
        )
    adapter = None if spec.adapter is None else find_adapter(spec.adapter)
    if backend != "jax":
        files = model_files.find(spec.model, spec.revision, any_family=True)
        others = backend is None and find_spec("torch") is not None  # without it the refusal names the families
        if backend == "torch" or (others and files.config.architecture not in FAMILIES):
            if spec.generation is not None:
                said = "a family that spile computes itself (spile models)"
                raise SpecError("spile infer", expected=said, found=files.config.architecture)
            if jax.process_count() > 1:
                raise SpecError("--backend torch", expected="one process", found=f"a pod of {jax.process_count()}")
            installed()
            return replace(files, adapter=adapter), "torch"
    files = model_files.find(spec.model, spec.revision)
    return files if adapter is None else files.adapted(adapter), "jax"


def rows_of(files: model_files.ModelFiles, taps: Sequence[Tap], store_dtype: str, backend: str) -> tuple[TapRows, ...]:
    """What the taps' rows are on disk."""
    if backend == "torch":
        return torch_rows(files, taps, store_dtype)
    return tuple(tap_rows(tap, files.config.sizes(tap.layer), store_dtype) for tap in taps)


def compute_platform(backend: str, default: str) -> str:
    """``cpu``, ``gpu`` or ``tpu``: where this backend computes; ``default`` is where JAX does."""
    if backend == "jax":
        return default
    return "gpu" if torch_device() == "cuda" else "cpu"


def torch_producer(
    files: model_files.ModelFiles, taps: Sequence[Tap], spec: ExtractSpec, batch_tokens: int, progress: Progress
) -> TorchProducer:
    """The model in PyTorch, said to be the slower way."""
    if spec.mesh_shape is not None:
        raise SpecError("--mesh-shape", expected="--backend jax, which has a mesh", found="--backend torch")
    name = files.config.architecture
    progress.log(f"{name} runs in PyTorch with forward hooks: slower than what spile computes itself (spile models)")
    model = load_model(files, spec.dtype)
    return TorchProducer(model, taps, store_dtype=spec.store_dtype, dtype=spec.dtype, most_tokens=batch_tokens)


def wants_statistics(asked: bool | None) -> bool:
    """Whether rows are added up as they are stored; an accelerator makes them faster than a host's cores can."""
    return jax.default_backend() == "cpu" if asked is None else asked


def compute_dtype_for(platform: str) -> str:
    """float32 on a CPU, where bf16 has no units and is slower; bfloat16 elsewhere."""
    return "float32" if platform == "cpu" else "bfloat16"


_LOOKED_AT = 256
"""Samples whose tokens are looked at before anything is written, where the tokenizer has more than the model."""


@dataclass(frozen=True)
class Parts:
    """What a spec names, found and checked; nothing was written yet."""

    spec: ExtractSpec
    root: Folder
    files: model_files.ModelFiles
    taps: tuple[Tap, ...]
    rows: tuple[TapRows, ...]
    samples: SampleStream
    identity: RunIdentity
    stream_identity: StreamIdentity
    tokenizer: Tokenizer


def find(spec: ExtractSpec, timeline: Timeline | None = None) -> Parts:
    """Everything that a spec names, checked as far as it can be before the weights are loaded.

    The devices are looked for and the weights are summed beside the reading of the tokenizer and the data.
    """
    timeline = timeline or Timeline()
    with timeline.span("model, tokenizer and data"), ThreadPoolExecutor(2, "spile-start") as threads:
        platform = threads.submit(_timed, timeline, "devices", jax.default_backend)
        root = _output(spec)
        known = read_run(root)
        files, backend = find_model(spec, known, root.url)
        spec = replace(spec, backend=backend)
        _refuse_positions(spec, files.config.learned_positions)
        summed = threads.submit(_timed, timeline, "the weights' checksum", files.weights_hash)
        return _found(spec, root, known, files, platform, summed)


T = TypeVar("T")


def _timed(timeline: Timeline, name: str, work: Callable[[], T]) -> T:
    with timeline.span(name):
        return work()


def _found(
    spec: ExtractSpec,
    root: Folder,
    known: RunIdentity | None,
    files: model_files.ModelFiles,
    platform: Future[str],
    summed: Future[str],
) -> Parts:
    taps = select_taps(spec.taps, spec.layers, files.config.n_layers, spec.heads, spec.top_k)
    generation = spec.generation
    taps = () if generation is not None and generation.capture == "none" else taps
    rows = rows_of(files, taps, spec.store_dtype, spec.backend)
    tokenizer = load_tokenizer(files.tokenizer_folder, optional=generation is None)
    samples = open_stream(spec.data, tokenizer, files.config.vocab_size)
    refuse_no_answers(spec, samples.prompt.kind)
    dtype = spec.dtype
    if dtype == "auto":
        where = compute_platform(spec.backend, platform.result())
        dtype = known.dtype if known else compute_dtype_for(where)  # type: ignore[assignment]
    identity = RunIdentity(
        model=files.name,
        revision=files.revision,
        architecture=files.config.architecture,
        d_model=files.config.d_model,
        n_layers=files.config.n_layers,
        weights=summed.result(),
        tokenizer=files.tokenizer_hash() if tokenizer.missing is None else "none",
        prompt=samples.prompt,
        seed=spec.data.seed,
        max_seq_length=spec.data.max_seq_length,
        long=spec.data.long,
        dtype=dtype,
        store_dtype=spec.store_dtype,
        backend=known.backend if known is not None and spec.same_numbers else spec.backend,
        adapter=spec.adapter,
        keep=tuple(sorted(spec.data.keep)),
        positions=spec.positions,
        generation=None if generation is None else with_stops(generation, files, tokenizer),
    )
    stream = StreamIdentity(
        samples.location,
        samples.sha256,
        samples.lines,
        samples.samples,
        taps,
        samples.streams,
        samples.split,
        {row.name: row.shape for row in rows if row.shape != (files.config.d_model,)},
    )
    if tokenizer.size > files.config.vocab_size:  # no fault by itself; the producer looks at every batch
        # After the identity: packed documents that end within this look would have a count that others have not.
        first = islice(samples.read(Ranges()), _LOOKED_AT)
        check_tokens((item for item in first if isinstance(item, Sample)), files.config.vocab_size)
    if known is not None:
        join_run(root, identity)  # compares: a run of other numbers is refused before anything is loaded
    return Parts(replace(spec, dtype=dtype), root, files, taps, rows, samples, identity, stream, tokenizer)


def _refuse_positions(spec: ExtractSpec, learned: int | None) -> None:
    """A model with learned positions has none for longer samples, their answers included."""
    answer = 0 if spec.generation is None else spec.generation.max_new_tokens
    if learned is not None and spec.data.max_seq_length + answer > learned:
        raise SpecError(
            "--max-seq-length and --max-new-tokens together" if answer else "--max-seq-length",
            expected=f"at most {learned}, the positions that {spec.model} has learned",
            found=spec.data.max_seq_length + answer,
            fix=f"add --max-seq-length {max(1, learned - answer)}",
        )


def _output(spec: ExtractSpec) -> Folder:
    """The dataset's home, with a copy on this machine where one is asked for."""
    home = open_folder(spec.output)
    return home if spec.local_copy is None else MirrorFolder(home, open_folder(spec.local_copy))


def bytes_per_token(parts: Parts) -> int:
    """What one token takes in a shard."""
    return row_bytes(parts.rows)


def sizes_for(parts: Parts) -> Sizes:
    """How much of it at once."""
    return choose_sizes(parts.spec, bytes_per_token(parts), parts.files.config)
