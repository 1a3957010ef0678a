"""Resolve a run spec: find the model, the tokenizer and the data, check them, and derive the run's identity.

Nothing is written here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from spile.compute.length import Room, room_here, with_length
from spile.compute.mesh import select_device
from spile.compute.producer import check_answer_positions, check_tokens
from spile.compute.progress import Progress
from spile.compute.resolved import ResolvedRun
from spile.compute.torch_backend import (
    learned_positions,
    read_torch_config,
    refuse_no_generation,
    require_torch,
    torch_devices,
    torch_rows,
)
from spile.data.prompts import kept_fields
from spile.data.samples import SampleStream, open_stream
from spile.data.sources import default_keep
from spile.data.split import of_stream
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import ModelError, RunMismatch, SpecError, UnsupportedModel, untrusted
from spile.models import model_files
from spile.models.adapters import find_adapter
from spile.models.architecture import ModelConfig
from spile.models.decoder import Steering
from spile.models.model_files import GENERATION
from spile.models.safetensors_files import DTYPES as WEIGHT_DTYPES
from spile.objects import open_folder, split
from spile.objects.folder import Folder, NotFound
from spile.objects.mirror import MirrorFolder
from spile.reading.dataset import no_config, stored_tokens
from spile.reading.dataset import open as open_dataset
from spile.spec.identity import RunIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import AUTO, EVERY_FIELD, DataSpec, GenerationSpec, PromptSpec, RunSpec
from spile.spec.safetensors import parse_header
from spile.spec.sample import Sample
from spile.spec.taps import REPORTED, Steer, Tap, TapRows, row_bytes, tap_rows
from spile.store.layout import stream_folder
from spile.store.run import join_run, read_run
from spile.store.writer import read_stream


def add_stop_tokens(generation: GenerationSpec, files: model_files.ModelFiles, tokenizer: Tokenizer) -> GenerationSpec:
    """Return the settings with the ids of all stop tokens: the model's own and those of ``--stop``."""
    tokens = {*_model_stop_tokens(files, tokenizer), *(_token_id(text, tokenizer) for text in generation.stop)}
    if not tokens:
        raise ModelError(
            f"{files.name} names no token that ends an answer",
            expected="eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
            found="neither",
            fix="name one with --stop, such as --stop '<|im_end|>'",
        )
    return replace(generation, stop_tokens=tuple(sorted(tokens)))


def _model_stop_tokens(files: model_files.ModelFiles, tokenizer: Tokenizer) -> set[int]:
    found = set() if tokenizer.eos is None else {tokenizer.eos}
    file = files.tokenizer_folder / GENERATION
    if file.is_file():
        with untrusted(ModelError, f"{GENERATION} of {files.name} cannot be read", fix="download the model again"):
            named = dict(json.loads(file.read_bytes())).get("eos_token_id")
        listed = named if isinstance(named, list) else [named]
        # A number outside of int32 is no token, and the device could not compare with it.
        found |= {token for token in listed if type(token) is int and abs(token) < 1 << 31}
    return found


def _token_id(text: str, tokenizer: Tokenizer) -> int:
    token: int | None = tokenizer.backend.token_to_id(text)
    if token is not None:
        return token
    tokens = tokenizer.encode([text], add_special=False)[0].tokens
    if len(tokens) != 1:
        raise SpecError("--stop", expected="the text of one token", found=f"{text!r}, which is {len(tokens)} tokens")
    return int(tokens[0])


def prompt_tokenizer(files: model_files.ModelFiles, prompt: PromptSpec, *, optional: bool) -> Tokenizer:
    """Load a model's tokenizer, with the chat template of ``--template-from`` if one is given."""
    tokenizer = load_tokenizer(files.tokenizer_folder, optional=optional)
    if prompt.template_from is None:
        return tokenizer
    other = model_files.find(prompt.template_from, None, weights=False, read=no_config)
    template = load_tokenizer(other.tokenizer_folder).template
    if template is None:
        raise SpecError("--template-from", expected="a model with a chat template", found=prompt.template_from)
    return replace(tokenizer, template=template)


def find_model(
    spec: RunSpec, existing: RunIdentity | None, url: str
) -> tuple[model_files.ModelFiles, Literal["jax", "torch"]]:
    """Find the files of the model and choose the backend that runs it.

    An existing run keeps its backend unless the user declares the numbers of the other one equal.
    """
    run_backend = None if existing is None else existing.backend
    backend = spec.backend if spec.backend != "auto" else run_backend
    if run_backend is not None and backend != run_backend and not spec.same_numbers:
        raise RunMismatch(
            f"{url} was begun with --backend {run_backend}",
            expected=f"--backend {run_backend}",
            found=f"--backend {backend}",
            fix="leave out --backend, declare the numbers of both equal with --same-numbers, or give another --output",
        )
    adapter = None if spec.adapter is None else find_adapter(spec.adapter)
    if backend != "torch":
        try:
            files = model_files.find(spec.model, spec.revision)
            return files if adapter is None else files.with_adapter(adapter), "jax"
        except UnsupportedModel as unsupported:
            if backend == "jax":
                raise
            _require_installed_torch(spec.model, unsupported)
    require_torch()
    if jax.process_count() > 1:
        raise SpecError("--backend torch", expected="one process", found=f"a pod of {jax.process_count()}")
    files = model_files.find(spec.model, spec.revision, read=read_torch_config)
    if spec.generation is not None:
        refuse_no_generation(files)
    return replace(files, adapter=adapter), "torch"


def model_of_run(
    run: RunIdentity, url: str, model: str | None = None, revision: str | None = None, *, tokenizer: bool = False
) -> tuple[model_files.ModelFiles, Literal["jax", "torch"]]:
    """Find the model of a stored run, or the same model elsewhere; refuse other weights, or another tokenizer."""
    revision = revision or (run.revision if model is None else None)
    files, backend = find_model(RunSpec(model=model or run.model, revision=revision, adapter=run.adapter), run, url)
    found = {"weights": files.weights_hash()}
    if tokenizer and run.tokenizer != "none":
        found["tokenizer"] = files.tokenizer_hash()
    for what, digest in found.items():
        if digest != getattr(run, what):
            raise ModelError(
                f"{files.name} is not the model of {url}",
                expected=f"{what} {getattr(run, what)}",
                found=f"{what} {digest}",
                fix=f"give the model that made it: {run.model}" + (f" at {run.revision}" if run.revision else ""),
            )
    return files, backend


def _require_installed_torch(model: str, unsupported: UnsupportedModel) -> None:
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UnsupportedModel(
            f"{model} needs PyTorch, which is not installed: {unsupported.problem}",
            expected="a family that spile computes itself (spile models)",
            found=unsupported.found,
            fix="run: pip install 'spile[torch]'",
        ) from unsupported


def check_editable(tap: Tap, config: ModelConfig, flag: str) -> int:
    """Return the width of a tap that is to be edited; refuse one that the model does not have or does not read."""
    if tap.spec is None or tap.kind in REPORTED:
        raise SpecError(flag, expected="a tap that the model computes with, such as residual.12", found=str(tap))
    if tap.layer is not None and tap.layer >= config.n_layers:
        raise SpecError(flag, expected=f"layers 0 to {config.n_layers - 1} of the model", found=str(tap))
    return tap_rows(tap, config.sizes(tap.layer), "float32").width


def read_steering(texts: Sequence[str], config: ModelConfig) -> Steering | None:
    """Read the vectors of ``--steer`` and check that they fit the model; None if there are none."""
    if not texts:
        return None
    steers = [Steer.parse(text) for text in texts]
    values = [_read_change(steer, config, f"--steer {text}") for steer, text in zip(steers, texts, strict=True)]
    return Steering(tuple(each.tap for each in steers), tuple(each.kind for each in steers), tuple(values))


def _read_change(steer: Steer, config: ModelConfig, flag: str) -> npt.NDArray[np.float32]:
    width = check_editable(steer.tap, config, flag)
    if steer.kind == "zero":
        return np.zeros(0, np.float32)
    found = _sample_rows(steer, flag) if steer.kind == "patch" else _read_vector(steer, flag).reshape(-1)
    if found.shape[-1] != width:
        raise SpecError(flag, expected=f"{width} numbers, the width of {steer.tap}", found=f"{found.shape[-1]}")
    values = found.astype(np.float32) * np.float32(steer.scale)
    if not np.isfinite(values).all():
        raise SpecError(flag, expected="finite numbers", found="NaN or infinity")
    if steer.kind != "ablate":
        return values
    norm = np.linalg.norm(values)
    if not norm > 0:
        raise SpecError(flag, expected="a direction", found="a vector of zeros")
    return (values / norm).astype(np.float32)


def _read_vector(steer: Steer, flag: str) -> npt.NDArray[Any]:
    """Read one tensor of a safetensors file."""
    folder, key = split(steer.source)
    try:
        content = open_folder(folder).get(key)
        places = parse_header(content, len(content)).places
    except (NotFound, ValueError) as error:
        raise SpecError(flag, expected="a safetensors file", found=str(error)) from error
    names = sorted(places)
    name = steer.name or (names[0] if len(names) == 1 else "")
    if name not in names:
        fix = f"name one of its tensors, such as {steer.source}#{names[0]}" if names else None
        raise SpecError(flag, expected="one tensor", found=steer.name or f"{len(names)} tensors", fix=fix)
    place = places[name]
    if place.code not in WEIGHT_DTYPES and place.code != "F64":
        raise SpecError(flag, expected="a tensor of F64, F32, F16 or BF16", found=place.code)
    return np.frombuffer(content[place.start : place.stop], place.dtype).reshape(place.shape)


def _sample_rows(steer: Steer, flag: str) -> npt.NDArray[Any]:
    """Read the rows of a sample at the tap; every token of the sample must have one."""
    try:
        sample = open_dataset(steer.source)[int(steer.name) if steer.name.isdecimal() else steer.name]
    except (IndexError, KeyError) as error:
        raise SpecError(flag, expected=f"a sample of {steer.source}", found=str(error)) from error
    if len(sample) != len(sample.context):
        found = f"rows of {len(sample)} of its {len(sample.context)} tokens"
        raise SpecError(flag, expected="a sample with rows of all tokens", found=found)
    return sample[steer.tap]


def steering_hash(steering: Steering | None) -> str | None:
    """Return a hash of everything that a steering changes in the numbers."""
    if steering is None:
        return None
    digest = hashlib.sha256()
    for tap, kind, value in zip(steering.taps, steering.kinds, steering.values, strict=True):
        digest.update(f"{tap}={kind}{value.shape}".encode() + value.tobytes())
    return digest.hexdigest()[:32]


def steering_of_run(run: RunIdentity, config: ModelConfig) -> Steering | None:
    """Read the vectors that a stored run was steered with; refuse other vectors."""
    steering = read_steering(run.steer, config)
    if steering_hash(steering) != run.steering:
        raise RunMismatch(
            f"--steer {' '.join(run.steer)} of this run",
            expected=f"vectors with the hash {run.steering}",
            found=f"{steering_hash(steering)}",
            fix="put the vectors of the run back",
        )
    return steering


def tap_rows_of(
    files: model_files.ModelFiles, taps: Sequence[Tap], store_dtype: str, backend: str
) -> tuple[TapRows, ...]:
    """Return name, shape and dtype of the stored rows of each tap."""
    if backend == "torch":
        if any(tap.gradient for tap in taps):
            raise SpecError("--gradients loss", expected="a model that runs in JAX", found="--backend torch")
        return torch_rows(files, taps, store_dtype)
    return tuple(tap_rows(tap, files.config.sizes(tap.layer), store_dtype) for tap in taps)


def wants_statistics(asked: bool | None) -> bool:
    """Return whether to compute statistics of the stored rows: by default only on a CPU, which is slow enough."""
    return jax.default_backend() == "cpu" if asked is None else asked


def use_device(device: str, backend: str) -> str:
    """Initialise the devices that ``--device`` names, and return their platform: cpu, gpu or tpu."""
    if backend == "torch":
        return "cpu" if torch_devices(device) == ("cpu",) else "gpu"
    return select_device(device)


def compute_dtype_for(platform: str) -> str:
    """Return float32 for a CPU, where bfloat16 is slower, and bfloat16 elsewhere."""
    return "float32" if platform == "cpu" else "bfloat16"


_CHECKED_SAMPLES = 256
"""Samples whose tokens are checked before anything is written if the tokenizer has more tokens than the model."""


def resolve(
    spec: RunSpec,
    progress: Progress | None = None,
    *,
    start_over: bool = False,
    agree: Callable[[str, Any], Any] = lambda _, value: value,
) -> ResolvedRun:
    """Find and check everything that a spec names, as far as possible before the weights are loaded.

    The devices are initialised and the weights are hashed while the tokenizer and the data are read.

    Args:
        spec: The run spec.
        progress: Counters and messages for a display.
        start_over: Whether the stored stream will be cleared, so that its data may differ.
        agree: Returns the value of the first host of a pod, by a name.

    """
    progress = progress or Progress()
    spec = replace(spec, data=of_stream(stored_tokens(spec.data)))
    with progress.span("model, tokenizer and data"), ThreadPoolExecutor(2, "spile-start") as threads:
        auto = spec.device == "auto"
        devices = threads.submit(progress.span("devices")(select_device), "auto") if auto else None
        output = open_folder(spec.output)
        root = output if spec.local_copy is None else MirrorFolder(output, open_folder(spec.local_copy))
        existing = read_run(root)
        files, backend = find_model(spec, existing, root.url)
        get_platform = devices.result if devices and backend == "jax" else partial(use_device, spec.device, backend)
        if not auto:
            get_platform()  # at once: there is no fallback for a device that the user names
        names = spec.stream_names if existing is None else existing.folders
        spec = replace(spec, backend=backend, stream_names=names)
        weights = threads.submit(progress.span("the weights' checksum")(files.weights_hash))
        return _resolve(spec, root, existing, files, get_platform, weights, agree, start_over=start_over)


def _resolve(
    spec: RunSpec,
    root: Folder,
    existing: RunIdentity | None,
    files: model_files.ModelFiles,
    get_platform: Callable[[], str],
    weights: Future[str],
    agree: Callable[[str, Any], Any],
    *,
    start_over: bool,
) -> ResolvedRun:
    taps = spec.selected_taps(files.config.n_layers)
    generation = spec.generation
    taps = () if generation is not None and generation.capture == "none" else taps
    rows = tap_rows_of(files, taps, spec.store_dtype, spec.backend)
    steering = _steering(spec, files.config)
    tokenizer = prompt_tokenizer(files, spec.data.prompt, optional=generation is None)
    spec = replace(spec, data=replace(spec.data, keep=_fields_to_keep(spec.data, existing)))
    samples = _open_samples(spec, root, tokenizer, files.config.vocab_size, start_over=start_over)
    spec = with_length(
        spec, existing, files.config, taps, row_bytes(rows), lambda: _room(get_platform, spec), learned(files, spec)
    )
    if spec.data.max_seq_length == AUTO:  # the hosts of a pod may have different amounts of memory
        spec = replace(spec, data=replace(spec.data, resolved_length=agree("max_seq_length", spec.data.longest)))
    samples = samples.with_spec(spec.data)
    if spec.dtype == "auto":
        dtype: Any = existing.dtype if existing else compute_dtype_for(get_platform())
        spec = replace(spec, dtype=dtype)
    identity = RunIdentity(
        model=files.name,
        revision=files.revision,
        architecture=files.config.architecture,
        d_model=files.config.d_model,
        n_layers=files.config.n_layers,
        weights=weights.result(),
        tokenizer=files.tokenizer_hash() if tokenizer.missing is None else "none",
        prompt=samples.prompt,
        seed=spec.data.seed,
        max_seq_length=spec.data.longest,
        long=samples.long,
        dtype=spec.dtype,
        store_dtype=spec.store_dtype,
        backend=existing.backend if existing is not None and spec.same_numbers else spec.backend,
        adapter=spec.adapter,
        vocab_size=files.config.vocab_size or None,
        keep=tuple(sorted(kept_fields(samples.prompt, spec.data))),
        positions=spec.positions,
        steer=spec.steer,
        steering=steering_hash(steering),
        folders=spec.stream_names,
        generation=None if generation is None else add_stop_tokens(generation, files, tokenizer),
    )
    shapes = {row.name: row.shape for row in rows if row.shape != (files.config.d_model,)}
    stream = replace(samples.identity, taps=taps, shapes=shapes)
    if tokenizer.size > files.config.vocab_size:  # allowed; the producer checks every batch
        # After the identity: packed documents that end within these samples would have a count that others have not.
        first = islice(samples.read(Ranges()), _CHECKED_SAMPLES)
        check_tokens((item for item in first if isinstance(item, Sample)), files.config.vocab_size)
    if existing is not None:
        join_run(root, identity)  # compares: a run with other numbers is refused before anything is loaded
    return ResolvedRun(spec, root, files, taps, rows, samples, identity, stream, tokenizer, steering)


def _steering(spec: RunSpec, config: ModelConfig) -> Steering | None:
    """Read the vectors of ``--steer``; refuse changes that would have no effect, and gradients of answers."""
    if spec.generation is not None and spec.gradients != "none":
        raise SpecError("--gradients loss", expected="spile extract", found="spile infer", fix="extract the answers")
    if spec.steer and spec.backend == "torch":
        raise SpecError("--steer", expected="a model that runs in JAX", found="--backend torch")
    at_end = [text for text in spec.steer if Steer.parse(text).tap.kind == "final_norm"]
    if at_end and spec.generation is not None:
        raise SpecError(f"--steer {at_end[0]}", expected="a tap before the final norm", found="final_norm")
    return read_steering(spec.steer, config)


def _open_samples(
    spec: RunSpec, root: Folder, tokenizer: Tokenizer, vocabulary: int, *, start_over: bool
) -> SampleStream:
    """Open the data, in the way in which the stream that is continued was begun."""
    folder = root.child(stream_folder(spec.data.worker_id, spec.stream_names))
    record = None if start_over else read_stream(folder)
    stored = None if record is None else record.identity
    samples = open_stream(spec.data, tokenizer, vocabulary, stored=stored, pod=jax.process_count() > 1)
    check_answer_positions(spec, samples.prompt.kind)
    return samples


def _room(get_platform: Callable[[], str], spec: RunSpec) -> Room:
    get_platform()  # after this, the devices can be asked for their memory
    return room_here(spec.backend)


def learned(files: model_files.ModelFiles, spec: RunSpec) -> int | None:
    """Return the number of positions that the model has learned, if it has these."""
    return learned_positions(files) if spec.backend == "torch" else files.config.learned_positions


def _fields_to_keep(data: DataSpec, existing: RunIdentity | None) -> tuple[str, ...]:
    """Return the fields to store with each sample: those named, those of the existing run, or all short ones."""
    if data.keep or data.prompt.pack:
        return data.keep
    if existing is not None:
        return existing.keep
    return (EVERY_FIELD,) if data.rows is not None else default_keep(data.location)
