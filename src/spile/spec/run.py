"""The run: what a user asks for, as one frozen noun that validates itself."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from spile.errors import SpecError
from spile.spec.positions import ALL, ANSWER, check_positions
from spile.spec.taps import TOP, Site, Tap, parse_sites

__all__ = [
    "DEFAULT_ENCODER",
    "EMBEDDED",
    "PROMPT_VERSIONS",
    "Backend",
    "BackfillSpec",
    "Capture",
    "ComputeDtype",
    "DataSpec",
    "ExtractSpec",
    "GenerationSpec",
    "LongPolicy",
    "PromptKind",
    "PromptSpec",
    "StoreDtype",
    "parse_taps",
]


EMBEDDED = "embedded"
"""The name of the model and of the dataset that ship inside the package."""

DEFAULT_ENCODER = "GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))"

PROMPT_VERSIONS = (
    "output-from-examples-v0",
    "output-from-examples-v1",
    "input-from-inputs-v0",
    "output-from-outputs-v0",
)
"""The ARC prompts; ``docs/prompts.md`` shows their words."""

PromptKind = Literal["auto", "arc", "chat", "text", "tokens"]
LongPolicy = Literal["truncate", "skip"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
StoreDtype = Literal["bfloat16", "float32", "float16", "int8", "float8_e4m3"]
Capture = Literal["both", "prompt", "answer", "none"]
"""Whose tokens' activations are kept where answers are generated."""
Backend = Literal["auto", "jax", "torch"]


def _one_of(flag: str, value: str, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise SpecError(flag, expected=f"one of {', '.join(known)}", found=repr(value))


def _within(flag: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (low <= value <= high and math.isfinite(value)):
        raise SpecError(flag, expected=f"from {low:,} to {high:,}", found=f"{value:,}")


@dataclass(frozen=True)
class PromptSpec:
    """How a line of the dataset becomes text and tokens. All of it changes the numbers."""

    kind: PromptKind = "auto"
    encoder: str = DEFAULT_ENCODER
    """How a grid is written, for ARC tasks."""
    version: str = "output-from-examples-v1"
    """Which ARC prompt."""
    predictions_per_task: int = 1
    """How many augmented variants of each task; variant 0 is the task itself."""
    column: str = "text"
    """The field that holds the text, or the token ids."""
    pack: bool = False
    """Cut documents into full windows instead of one sample a document."""

    def __post_init__(self) -> None:
        _one_of("--prompt", self.kind, PromptKind)
        _within("--predictions-per-task", self.predictions_per_task, 1, 4096)
        if self.version not in PROMPT_VERSIONS:
            raise SpecError(
                "--prompt-version", expected=f"one of {', '.join(PROMPT_VERSIONS)}", found=repr(self.version)
            )
        if self.pack and self.kind in ("arc", "chat", "tokens"):
            raise SpecError("--pack", expected="--prompt text", found=f"--prompt {self.kind}")
        if self.predictions_per_task > 1 and self.kind in ("chat", "text", "tokens"):
            raise SpecError("--predictions-per-task above 1", expected="--prompt arc", found=f"--prompt {self.kind}")
        if not self.column:
            raise SpecError("--column", expected="a field's name", found="an empty one")


@dataclass(frozen=True)
class DataSpec:
    """Which samples, and how long they may be."""

    dataset: str = EMBEDDED
    """A file, a bucket's object, a dataset of the hub, or ``embedded``."""
    dataset_dir: str | None = None
    """A folder of streams; with ``worker_id`` 5 the dataset is its ``stream_005.jsonl``."""
    worker_id: int = 0
    """The stream's number: names the input in ``dataset_dir`` and the output ``tpu_5/``."""
    prompt: PromptSpec = field(default_factory=PromptSpec)
    max_seq_length: int = 2048
    long: LongPolicy = "truncate"
    """What happens to a sample longer than that."""
    max_samples: int | None = None
    """Stop after the stream's first so many samples; never part of the run's identity."""
    seed: int = 0
    expect_split: str | None = None
    """The split that the stream must be of, as its ``streams.json`` digests to; None: any. Not part of the identity."""
    split: str | None = None
    """Of a dataset of the hub: ``train``, or some of its rows, ``train[:1000]``; None: train."""
    config_name: str | None = None
    """The hub dataset's configuration."""
    keep: tuple[str, ...] = ()
    """Fields of each row that are stored with its sample."""

    def __post_init__(self) -> None:
        _within("--worker-id", self.worker_id, 0, 99_999)
        _within("--max-seq-length", self.max_seq_length, 1, 1 << 20)
        _within("--max-samples", self.max_samples, 1, 1 << 40)
        _within("--seed", self.seed, 0, (1 << 63) - 1)
        _one_of("--long", self.long, LongPolicy)
        if not all(self.keep) or len(set(self.keep)) != len(self.keep):
            raise SpecError("--keep", expected="names of fields, each once", found=",".join(self.keep))
        if self.keep and self.prompt.pack:
            raise SpecError(
                "--keep", expected="a sample for each row", found="--pack, whose windows hold parts of many"
            )

    @property
    def location(self) -> str:
        """Where the stream's file is."""
        if self.dataset_dir is None:
            return self.dataset
        return f"{self.dataset_dir.rstrip('/')}/stream_{self.worker_id:03d}.jsonl"


@dataclass(frozen=True)
class GenerationSpec:
    """How prompts are answered, and whose activations are kept. All of it changes the numbers."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts of tokens that end an answer, beside the model's own end of a turn."""
    stop_tokens: tuple[int, ...] = ()
    """All of them as numbers, found when the model is."""
    capture: Capture = "both"

    def __post_init__(self) -> None:
        _within("--max-new-tokens", self.max_new_tokens, 1, 1 << 17)
        _within("--temperature", self.temperature, 0, 100)
        _within("--top-p", self.top_p, 1e-6, 1)
        _one_of("--capture", self.capture, Capture)


@dataclass(frozen=True)
class ExtractSpec:
    """One extraction: a model, a dataset, taps, an output."""

    model: str = EMBEDDED
    """A name on the Hugging Face hub, a folder, a bucket's folder, or ``embedded``."""
    revision: str | None = None
    adapter: str | None = None
    """A LoRA adapter that is merged into the weights: a folder, or a name on the hub."""
    backend: Backend = "auto"
    """``auto``: what the run already uses; else jax for the families of the table, torch for all others."""
    same_numbers: bool = False
    """The user declares another backend's numbers equal, so that it may continue a run."""
    data: DataSpec = field(default_factory=DataSpec)
    output: str = "./activations"
    local_copy: str | None = None
    """Beside a bucket: a folder that gets each shard too."""
    delete_local_after_upload: bool = False
    """Remove each local copy once its commit stands."""
    layers: tuple[int, ...] | None = None
    """None: every layer."""
    sites: tuple[Site, ...] = ("residual",)
    heads: tuple[int, ...] | None = None
    """Of the sites with heads, only these; None: all."""
    top_k: int = TOP
    """Logits kept of each token, where ``logits`` is tapped."""
    dtype: ComputeDtype = "auto"
    """``auto``: what the run already uses; else float32 on a CPU, bfloat16 elsewhere."""
    store_dtype: StoreDtype = "bfloat16"
    positions: str = ALL
    """Which tokens' rows are stored: ``all``, ``last``, ``answer`` or ``random:32``."""
    batch_size: int | None = None
    """Rows per device in one step at most; None: the token budget decides alone."""
    batch_tokens: int | None = None
    """Tokens per device in one step, padding included; None: chosen for the device."""
    mesh_shape: tuple[int, int] | None = None
    """Devices as data × model; None: the least model parallelism that leaves room for a batch."""
    shard_size_gb: float = 1.0
    commit_every: float | None = 60.0
    """Seconds after which a short shard is committed; None: only full shards."""
    statistics: bool | None = None
    """Take count, mean, variance and norms of each tap's rows as they go by; None: where the model runs on a CPU."""
    checkpointing: bool = True
    """False: the ledger is ignored and every sample is computed; refused where commits exist."""
    overwrite: bool = False
    checkpoint_dir: str | None = None
    """Gets ``checkpoint_worker_N.json``, for people; never read."""
    generation: GenerationSpec | None = None
    """Answers are generated too; None: the prompts' activations alone."""
    answers_dir: str | None = None
    """A folder that gets ``predictions.jsonl`` and ``submission.json``; None: the stream's own."""

    def __post_init__(self) -> None:
        if not self.model or not self.output:
            raise SpecError("--model and --output", expected="a name or a path", found="an empty one")
        _one_of("--dtype", self.dtype, ComputeDtype)
        _one_of("--store-dtype", self.store_dtype, StoreDtype)
        _one_of("--backend", self.backend, Backend)
        check_positions(self.positions)
        _within("--batch-size", self.batch_size, 1, 1 << 20)
        _within("--batch-tokens", self.batch_tokens, 1, 1 << 28)
        _within("--shard-size-gb", self.shard_size_gb, 1e-6, 64)
        _within("--commit-every", self.commit_every, 0.01, 1e9)
        parse_sites(self.sites)
        _within("--top-k", self.top_k, 1, 1 << 16)
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise SpecError("--layers", expected="layers from 0 up", found=str(list(self.layers)))
        self._check_captured()
        if self.overwrite and self.checkpointing:
            raise SpecError("--overwrite", expected="--no-checkpointing beside it", found="--overwrite alone")

    def _check_captured(self) -> None:
        """Positions among tokens whose rows there are."""
        lacking = {"none": True, "prompt": self.positions == ANSWER}
        if self.positions != ALL and self.generation is not None and lacking.get(self.generation.capture):
            raise SpecError(
                f"--positions {self.positions}",
                expected="--capture both or answer",
                found=f"--capture {self.generation.capture}",
            )


def parse_taps(words: Iterable[str]) -> tuple[Tap, ...]:
    """``mlp.12 z.3.0-3,7`` → taps, each once, in an order of their own, so that the same taps are the same addition.

    Those with a dtype of their own, which has four bytes, come first: every tensor of a shard is aligned.
    """
    texts = [text for word in words for text in re.split(r"\s+|,(?=[a-z])", word) if text]
    taps = {Tap.parse(text) for text in texts}
    if not taps:
        raise SpecError("--add-taps", expected="taps such as mlp.12", found="none")
    own = {tap: tap.spec is not None and tap.spec.dtype is not None for tap in taps}
    return tuple(sorted(taps, key=lambda tap: (not own[tap], -1 if tap.layer is None else tap.layer, str(tap))))


@dataclass(frozen=True)
class BackfillSpec:
    """Taps added to a dataset that is there. What is None is as the dataset has it; else it must be the same."""

    root: str
    taps: tuple[Tap, ...]
    model: str | None = None
    """Where the dataset's model is now, if not where ``run.json`` says."""
    revision: str | None = None
    worker_id: int | None = None
    """One stream; None: all of them."""
    dtype: ComputeDtype = "auto"
    store_dtype: StoreDtype | None = None
    positions: str | None = None
    max_samples: int | None = None
    """The bound that the dataset was made with, if it was."""
    statistics: bool | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    mesh_shape: tuple[int, int] | None = None
