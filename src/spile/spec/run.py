"""The run spec: everything that a user asks for, as one frozen, validated and serialisable tree of dataclasses.

Each field is defined once, with its type, default, help text, flag group and role. Command-line flags, Python keyword
arguments, ``--config`` files, ``SPILE_*`` variables, ``spec.json`` and ``docs/cli.md`` all derive from these fields and
use the same flat names: the field ``spec.data.prompt.kind`` is ``--prompt``, ``prompt=`` and ``"prompt"``. A secret is
never a field.
"""

# ruff: noqa: RUF009  (option returns a dataclass field)

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from spile.errors import SpecError
from spile.spec.amounts import parse_amount
from spile.spec.options import (
    OPTION,
    CommandName,
    Option,
    check_number,
    check_options,
    convert_value,
    option,
    split_names,
    toml_value,
)
from spile.spec.positions import ALL, ANSWER, MEAN, check_positions, refuse_mean_of_ids
from spile.spec.taps import (
    ATTENTION_TOP,
    TOP,
    Steer,
    Tap,
    layers_text,
    parse_layers,
    parse_tap_words,
    select_taps,
    with_gradients,
)

SPEC_VERSION = 1
"""The version of the serialised form. A spec of a newer version is refused."""

EMBEDDED = "embedded"
"""The name of the model and of the dataset that are part of the package."""

STORED = "spile:"
"""What ``--dataset`` begins with if it names a stored dataset, whose tokens are the data."""

DEFAULT_ENCODER = "GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder()))"

EVERY_FIELD = "*"
"""The value of ``keep`` that stands for all short scalar fields of each row."""

LIMITS = ("max_samples", "max_samples_per_stream", "max_tokens", "max_bytes")
"""The fields that end a run before the end of its data."""

_STREAM_FILE = re.compile(r"stream_(\d{3,})\.jsonl", re.ASCII)


def stream_file(number: int) -> str:
    """Return the file name of a stream of a split dataset, such as ``stream_005.jsonl``."""
    return f"stream_{number:03d}.jsonl"


def stream_file_number(path: str) -> int | None:
    """Return the number of a stream from the path of its file; None if the path has another name."""
    match = _STREAM_FILE.fullmatch(path.rpartition("/")[2])
    return None if match is None else int(match[1])


PromptKind = Literal["auto", "arc", "chat", "text", "tokens"]
PromptVersion = Literal[
    "output-from-examples-v0", "output-from-examples-v1", "input-from-inputs-v0", "output-from-outputs-v0"
]
"""The ARC prompts; ``docs/prompts.md`` shows their texts."""
LongPolicy = Literal["auto", "truncate", "skip"]
Automatic = Literal["auto"]
AUTO: Automatic = "auto"
MAX_LENGTH = 1 << 20
"""The largest value of ``--max-seq-length``."""
BadRows = Literal["error", "skip"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
StoreDtype = Literal["bfloat16", "float32", "float16", "int8", "float8_e4m3"]
Capture = Literal["both", "prompt", "answer", "none"]
"""Which tokens' activations are stored if answers are generated."""
Gradients = Literal["none", "loss"]
Backend = Literal["auto", "jax", "torch"]
FolderNames = Literal["stream", "tpu"]
"""The names of the streams' folders: ``stream_5`` or ``tpu_5``."""
Device = Literal["auto", "cpu", "cuda", "tpu"]

_BOTH: tuple[CommandName, ...] = ("extract", "infer")
_model = partial(option, "Model")
_data = partial(option, "Data")
_prompts = partial(option, "Prompts", identity=True)
_taps = partial(option, "Taps")
_answers = partial(option, "Answers", identity=True)
_output = partial(option, "Output")
_batching = partial(option, "Batching (does not change the numbers)")


def parse_mesh_shape(text: str) -> tuple[int, int]:
    """Parse ``16,16`` or ``16x16`` as (data, model); ``8`` is (8, 1)."""
    words = [word for word in re.split(r"[,x×\s()\[\]]+", text.strip().lower()) if word]
    if not 1 <= len(words) <= 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise SpecError("--mesh-shape", expected="DATA,MODEL such as 16,16", found=repr(text))
    data, model = (*map(int, words), 1)[:2]
    return data, model


def parse_length(text: str) -> int | Automatic:
    """Parse the value of ``--max-seq-length``."""
    if text.strip() == AUTO:
        return AUTO
    if not text.strip().isdecimal():
        raise SpecError("--max-seq-length", expected="auto or a whole number", found=repr(text))
    return int(text)


@dataclass(frozen=True)
class PromptSpec:
    """How a row of the dataset becomes text and tokens. Every field is part of the run's identity."""

    kind: PromptKind = _prompts("auto", "What a row of the dataset is. auto decides by the first row.", name="prompt")
    encoder: str = _prompts(DEFAULT_ENCODER, "How ARC grids are written as text.", name="grid_encoder")
    version: PromptVersion = _prompts("output-from-examples-v1", "The ARC prompt.", name="prompt_version")
    predictions_per_task: int = _prompts(
        1, "Augmented variants of each ARC task. Variant 0 is the task itself.", limits=(1, 4096)
    )
    column: str = _prompts("text", "The field of a row that holds the text or the token ids.", common=_BOTH)
    pack: bool = _prompts(False, "Cut documents into full sequences instead of one sample per document.")
    template_from: str | None = _prompts(
        None, "Another model whose chat template is used, for a base model that has none."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.pack and self.kind in ("arc", "chat", "tokens"):
            raise SpecError("--pack", expected="--prompt text", found=f"--prompt {self.kind}")
        if self.predictions_per_task > 1 and self.kind in ("chat", "text", "tokens"):
            raise SpecError("--predictions-per-task above 1", expected="--prompt arc", found=f"--prompt {self.kind}")
        if self.template_from is not None and self.kind in ("text", "tokens"):
            raise SpecError("--template-from", expected="--prompt chat or arc", found=f"--prompt {self.kind}")
        if not self.column:
            raise SpecError("--column", expected="the name of a field", found="an empty name")


class LimitShare(NamedTuple):
    """What one of several streams has of the limits of a run."""

    samples: int | None
    """Its part of ``max_samples``; None without that limit."""
    streams: int
    """The number of streams, which share ``max_tokens`` and ``max_bytes`` equally."""


@dataclass(frozen=True)
class DataSpec:
    """Which samples are processed, and how long they may be."""

    dataset: str = _data(
        EMBEDDED,
        "A JSONL, CSV, TSV, text, JSON or Parquet file, a folder of text files or ARC tasks, a dataset on the Hugging "
        "Face hub, or embedded; or spile:ROOT for the tokens of a stored dataset.",
        common=_BOTH,
    )
    dataset_dir: str | None = _data(None, "A folder of streams. --worker-id 5 reads its stream_005.jsonl.")
    worker_id: int = _data(
        0,
        "The number of the stream: reads stream_005.jsonl, writes stream_5/.",
        default="the number in the name of --dataset stream_005.jsonl; else 0",
        limits=(0, 99_999),
    )
    prompt: PromptSpec = field(default_factory=PromptSpec)
    max_seq_length: int | Automatic = _prompts(
        AUTO,
        "The longest sample, in tokens. auto: what the run already uses; otherwise what the model takes and the memory "
        "of a device holds.",
        parse=parse_length,
        common=("extract",),
    )
    long: LongPolicy = _prompts(
        "auto",
        "Whether a longer sample is cut or skipped. auto: skip if answers are generated, and ARC tasks and chats above "
        "an automatic limit, because their end is their question; truncate otherwise.",
    )
    max_samples: int | None = _data(
        None, "Stop after this many samples, the first of the data.", limits=(1, 1 << 40), common=_BOTH
    )
    max_samples_per_stream: int | None = _data(None, "Stop each stream after this many samples.", limits=(1, 1 << 40))
    max_tokens: int | None = _data(
        None,
        "Stop once this many tokens are stored, in each of N streams an N-th of them: 100M, 500k, …",
        parse=partial(parse_amount, "--max-tokens"),
        limits=(1, 1 << 50),
    )
    max_bytes: int | None = _data(
        None,
        "Stop once this many bytes of activations are stored, in each of N streams an N-th of them: 1GB, 500MB, …",
        parse=partial(parse_amount, "--max-bytes", unit="B"),
        limits=(1, 1 << 60),
    )
    seed: int = _prompts(
        0, "The seed of augmentations, of sampling and of --positions random.", limits=(0, (1 << 63) - 1)
    )
    expect_split: str | None = _data(
        None, "Refuse streams that belong to another split than this one; spile deploy passes it to workers."
    )
    bad_rows: BadRows = _data(
        "error",
        "What happens if a row of the dataset cannot be used: stop with an error that names it, or skip it and record "
        "it in the dataset as skipped.",
    )
    split: str | None = _data(None, "The split of a hub dataset, or a part of it: train[:1000].", default="train")
    config_name: str | None = _data(None, "The configuration of a hub dataset.")
    dataset_revision: str | None = _data(
        None, "The branch, tag or commit of a hub dataset.", default="its newest commit, which a resume keeps"
    )
    of_streams: int | None = _data(
        None, "Read only every N-th row, from row --worker-id on; --num-workers sets it.", flag=False
    )
    keep: tuple[str, ...] = _data(
        (),
        "Fields of each row to store with its sample, such as label,source; * stores all numbers and short texts.",
        identity=True,
        default="what the run already stores; otherwise * for JSON, JSONL, CSV and TSV files of texts, none for others",
        parse=split_names,
    )
    rows: Any = field(default=None, repr=False, compare=False)
    """The rows of data that is given in Python instead of by name. It is not part of the serialised form."""
    share: LimitShare | None = field(default=None, repr=False, compare=False)
    """The stream's part of the limits, if the run has several. It is not part of the serialised form."""
    resolved_length: int | None = field(default=None, repr=False, compare=False)
    """The number that ``--max-seq-length auto`` stands for in this run. It is not part of the serialised form."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_seq_length != AUTO:
            check_number("--max-seq-length", parse_length(str(self.max_seq_length)), 1, MAX_LENGTH)  # type: ignore[arg-type]
        check_number("of_streams", self.of_streams, self.worker_id + 1, 100_000)
        if self.bad_rows == "skip" and self.prompt.pack:
            raise SpecError("--bad-rows skip", expected="one sample per row", found="--pack")
        if not all(self.keep) or len(set(self.keep)) != len(self.keep):
            raise SpecError("--keep", expected="names of fields, each once", found=",".join(self.keep))
        if self.keep and self.prompt.pack:
            raise SpecError(
                "--keep", expected="one sample per row", found="--pack, which joins parts of many rows to one sample"
            )

    @property
    def longest(self) -> int:
        """The longest sample, in tokens. An automatic limit that is not resolved yet is no limit."""
        return self.resolved_length or MAX_LENGTH if self.max_seq_length == AUTO else self.max_seq_length

    def of_run(self, length: int, long: str) -> DataSpec:
        """Return the data with the automatic limit of length of an existing run, and what happens above it."""
        long = long if self.long == "auto" else self.long
        return replace(self, resolved_length=length, long=long)  # type: ignore[arg-type]

    def long_policy(self, kind: str) -> Literal["truncate", "skip"]:
        """Return whether samples of this kind of prompt that are too long are cut or skipped."""
        if self.long != "auto":
            return self.long
        return "skip" if self.max_seq_length == AUTO and kind in ("arc", "chat") else "truncate"

    def token_limit(self, bytes_per_token: int) -> int | None:
        """Return the number of stored tokens at which ``max_tokens`` or ``max_bytes`` ends a stream, or None."""
        of_bytes = None if self.max_bytes is None else -(-self.max_bytes // bytes_per_token)
        most = min((limit for limit in (self.max_tokens, of_bytes) if limit is not None), default=None)
        return most if most is None or self.share is None else -(-most // self.share.streams)

    @property
    def sample_limit(self) -> int | None:
        """The number of samples of the stream at which ``max_samples`` or ``max_samples_per_stream`` ends it."""
        own = self.max_samples if self.share is None else self.share.samples
        return min((limit for limit in (own, self.max_samples_per_stream) if limit is not None), default=None)

    @property
    def limits(self) -> str:
        """The flags that limit the stream, as they would be typed; empty without a limit."""
        values = {name: getattr(self, name) for name in LIMITS}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value is not None)

    @property
    def location(self) -> str:
        """The location of the stream's file."""
        if self.dataset_dir is None:
            return self.dataset
        return f"{self.dataset_dir.rstrip('/')}/{stream_file(self.worker_id)}"


@dataclass(frozen=True)
class GenerationSpec:
    """How prompts are answered, and which activations are stored. Every field is part of the run's identity."""

    max_new_tokens: int = _answers(
        1100,
        "The longest answer, in tokens; a 30×30 ARC grid takes 1,030.",
        limits=(1, 1 << 17),
        common=("infer",),
    )
    temperature: float = _answers(
        0.0,
        "The sampling temperature. 0 always takes the most likely token.",
        limits=(0, 100),
        common=("infer",),
    )
    top_p: float = _answers(
        1.0, "Sample from the most likely tokens whose probabilities add up to this.", limits=(1e-6, 1)
    )
    stop: tuple[str, ...] = _answers((), "Tokens that end an answer, in addition to the model's own.")
    stop_tokens: tuple[int, ...] = _answers(
        (), "All tokens that end an answer, by number; filled in when the model is loaded.", identity=False, flag=False
    )
    capture: Capture = _answers("both", "Which tokens' activations are stored.", common=("infer",))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class RunSpec:
    """One run: a model, a dataset, taps and an output."""

    model: str = _model(
        EMBEDDED,
        "A model on the Hugging Face hub, a folder, a folder in a bucket, or embedded.",
        identity=True,
        default="embedded; none for a bucket or a pod",
        common=_BOTH,
    )
    revision: str | None = _model(None, "The branch, tag or commit of a hub model.")
    adapter: str | None = _model(
        None, "A LoRA adapter to merge into the weights: a folder, or a name on the hub.", identity=True
    )
    backend: Backend = _model(
        "auto",
        "The framework that runs the model. auto: the one that the run already uses; otherwise jax for the families "
        "that spile models lists, torch for all others.",
        identity=True,
    )
    device: Device = _model(
        "auto", "The kind of device that runs the model. auto: a TPU or GPU if there is one, otherwise the CPU."
    )
    same_numbers: bool = _model(False, "Continue a run of another backend: you declare that their numbers are equal.")
    data: DataSpec = field(default_factory=DataSpec)
    output: str = _output(
        "",
        "Where the activations are stored: a folder, gs://…, s3://… or az://…",
        default="./activations; ./inference if answers are generated",
        common=_BOTH,
    )
    stream_names: FolderNames = _output(
        "stream",
        "The names of the streams' folders in a new dataset: stream_5, or tpu_5.",
        default="stream; tpu for a script of the guides",
    )
    local_copy: str | None = _output(None, "If the output is a bucket: a folder that also gets each shard.")
    layers: tuple[int, ...] | None = _taps(
        None,
        "The layers of the taps that are named without one: all, or 0-11,20, or 0 1 2.",
        default="all",
        parse=parse_layers,
        format=layers_text,
        common=_BOTH,
    )
    taps: tuple[str, ...] = _taps(
        ("residual",),
        "What to store: residual.12, mlp.3-5, z.12.0-3, embed, …; a kind without a layer, such as residual, is taken "
        "at each of --layers. docs/taps.md lists all kinds.",
        default="residual",
        parse=lambda text: parse_tap_words([text]),
        common=_BOTH,
    )
    heads: tuple[int, ...] | None = _taps(
        None,
        "The heads of q, k, v, z, head_out and pattern taps that are named without them, such as 0-3,7.",
        default="all",
        parse=partial(parse_layers, flag="--heads"),
        format=layers_text,
    )
    top_k: int = _taps(TOP, "The number of logits of each token that --taps logits stores.", limits=(1, 1 << 16))
    attention_top: int = _taps(
        ATTENTION_TOP,
        "The number of attention weights of each token and head that --taps pattern stores.",
        limits=(1, 1 << 16),
    )
    gradients: Gradients = _taps(
        "none",
        "loss: for each tap, also store the gradient of the sample's loss (the mean cross-entropy of its next tokens) "
        "with respect to it, as grad.residual.12.",
    )
    steer: tuple[str, ...] = _taps(
        (),
        "Change taps while the model computes: residual.12=vector.safetensors:2.0 adds twice a vector (of several in a "
        "file: FILE#NAME:2.0), residual.12=ablate:FILE removes its direction, z.12.0-3=zero sets to zero, and "
        "residual.12=patch:ROOT#SAMPLE takes the rows of a stored sample.",
        identity=True,
    )
    dtype: ComputeDtype = _model(
        "auto",
        "The precision of the computation. auto: what the run already uses; otherwise float32 on a CPU, bfloat16 on "
        "accelerators.",
        identity=True,
    )
    store_dtype: StoreDtype = _output(
        "bfloat16", "The data type of stored activations.", identity=True, common=("extract",)
    )
    positions: str = _output(
        ALL,
        "The tokens whose activations are stored: all, last, last-content, first:8, answer, or random:32. mean stores "
        "one row per sample, the mean over its tokens.",
        identity=True,
        common=("extract",),
    )
    batch_size: int | None = _batching(
        None,
        "The largest number of batch rows per device; a batch row holds one long sample or several short ones. When "
        "answers are generated: answers at a time.",
        limits=(1, 1 << 20),
    )
    batch_tokens: int | None = _batching(
        None,
        "The number of tokens per device and batch, padding included.",
        default="chosen for the device",
        limits=(1, 1 << 28),
    )
    mesh_shape: tuple[int, int] | None = _batching(
        None,
        "The devices as DATA,MODEL, such as 16,16.",
        default="the least model parallelism that leaves room for a batch",
        parse=parse_mesh_shape,
        format=lambda shape: f"{shape[0]},{shape[1]}",
    )
    shard_size_gb: float = _output(1.0, "The approximate size of a shard.", limits=(1e-6, 64))
    commit_every: float | None = _output(
        60.0,
        "Commit finished samples at least this often, in seconds. Full shards are committed at once.",
        limits=(0.01, 1e9),
    )
    statistics: bool | None = _output(
        None, "Compute mean, variance and norms of each tap during the run.", default="only on a CPU"
    )
    checkpoint_dir: str | None = _output(
        None, "A folder that gets checkpoint_worker_N.json for people to read. It is never read back."
    )
    generation: GenerationSpec | None = None
    """How answers are generated; None stores the activations of the prompts only."""
    answers_dir: str | None = _answers(
        None,
        "A folder that gets predictions.jsonl and submission.json.",
        identity=False,
        default="the folder of the stream",
    )

    def __post_init__(self) -> None:
        self._resolve_defaults()
        if not self.model:
            raise SpecError("--model", expected="a name or a path", found="an empty text")
        if self.output.startswith("hf://"):
            fix = f"write to a folder or a bucket, and then: spile push ROOT {self.output}"
            raise SpecError("--output", expected="a folder or a bucket", found=self.output, fix=fix)
        check_options(self)
        if self.data.prompt.pack and self.data.max_seq_length == AUTO:
            fix = "give the length of the sequences, such as --max-seq-length 2048"
            raise SpecError("--pack", expected="a number of tokens as --max-seq-length", found=AUTO, fix=fix)
        check_positions(self.positions)
        for word in self.steer:
            Steer.parse(word)
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise SpecError("--layers", expected="layers from 0 up", found=str(list(self.layers)))
        self._check_captured()
        if self.generation is not None and self.generation.capture == "none" and self.data.token_limit(1) is not None:
            raise SpecError("--max-tokens and --max-bytes", expected="stored activations", found="--capture none")

    def _resolve_defaults(self) -> None:
        """Fill in the defaults that depend on whether answers are generated, and normalise the taps."""
        answers = self.generation is not None
        object.__setattr__(self, "taps", parse_tap_words(self.taps))
        if not self.output:
            object.__setattr__(self, "output", "./inference" if answers else "./activations")
        if self.data.long == "auto" and answers:
            object.__setattr__(self, "data", replace(self.data, long="skip"))

    def _check_captured(self) -> None:
        missing = {"none": True, "prompt": self.positions == ANSWER}
        if self.positions != ALL and self.generation is not None and missing.get(self.generation.capture):
            raise SpecError(
                f"--positions {self.positions}",
                expected="--capture both or answer",
                found=f"--capture {self.generation.capture}",
            )
        if self.positions == MEAN and self.generation is not None:
            fix = "store all tokens and pool them when reading, or run spile extract on the answers"
            raise SpecError("--positions mean", expected="spile extract", found="spile infer", fix=fix)

    def selected_taps(self, n_layers: int) -> tuple[Tap, ...]:
        """Return the taps of a model with ``n_layers`` layers, in the order in which they are stored."""
        taps = select_taps(self.taps, self.layers, n_layers, self.heads, self.top_k, self.attention_top)
        refuse_mean_of_ids(self.positions, taps)
        return taps if self.gradients == "none" else with_gradients(taps)

    @property
    def one_stream(self) -> int | None:
        """The number of the only stream of the data; None if the data has several."""
        several = self.data.dataset_dir is not None or self.data.of_streams is not None
        return None if several else self.data.worker_id

    def for_stream(self, stream: int) -> RunSpec:
        """Return this spec for one stream of the dataset."""
        return replace(self, data=replace(self.data, worker_id=stream))

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as a flat mapping of JSON values, by the names of the flags."""
        values: dict[str, Any] = {"version": SPEC_VERSION, "command": "extract" if self.generation is None else "infer"}
        for each in spec_fields():
            if each.path[0] == "generation" and self.generation is None:
                continue
            value = each.get(self)
            if value is not None and each.option.format is not None:
                value = each.option.format(value)
            values[each.name] = list(value) if isinstance(value, tuple) else value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the run spec") -> RunSpec:
        """Return the spec that :meth:`to_dict` described.

        Args:
            values: The mapping. A missing field has its default value.
            source: Where the mapping was read from, for error messages.

        Raises:
            SpecError: If a field is unknown or has a value of the wrong type, or if the version is newer.

        """
        rest = dict(values)
        version, command = rest.pop("version", SPEC_VERSION), rest.pop("command", "extract")
        if type(version) is not int or not 1 <= version <= SPEC_VERSION:
            raise SpecError(
                f"{source} has version {version!r}",
                expected=f"at most {SPEC_VERSION}",
                fix="read it with the version of spile that wrote it",
            )
        if command not in ("extract", "infer"):
            raise SpecError(f"{source}: command", expected="extract or infer", found=repr(command))
        return make_spec(rest, infer=command == "infer", source=source)

    def to_json(self) -> bytes:
        """Return the spec as the content of ``spec.json``."""
        return (json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, content: bytes | str, source: str = "the run spec") -> RunSpec:
        """Return the spec that :meth:`to_json` or :meth:`to_toml` wrote."""
        text = content.decode(errors="replace") if isinstance(content, bytes) else content
        try:
            values = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{source} is neither JSON nor TOML", found=str(error)[:200]) from error
        return cls.from_dict(values, source)

    def to_toml(self) -> str:
        """Return the spec as TOML, which ``--config`` accepts as well. Fields without a value are left out."""
        lines = []
        for name, value in self.to_dict().items():
            if value is None and name == "commit_every":
                value = "never"
            if value is not None:
                lines.append(f"{name} = {toml_value(value)}")
        return "\n".join(lines) + "\n"


class SpecField(NamedTuple):
    """One field of the run spec, with its place in the tree."""

    name: str
    """The flat name: the flag without dashes, and the keyword argument."""
    path: tuple[str, ...]
    """The attributes from the spec to the value: ``("data", "prompt", "kind")``."""
    hint: Any
    default: Any
    option: Option

    def get(self, spec: RunSpec) -> Any:
        """Return the value of this field."""
        value: Any = spec
        for name in self.path:
            value = getattr(value, name)
        return value

    def convert(self, value: Any, source: str) -> Any:
        """Return a value as this field has it: text is parsed, lists become tuples, the type is checked."""
        if self.name == "commit_every" and value == "never":  # TOML has no null.
            return None
        if self.option.parse is not None and value is not None and not isinstance(value, tuple):
            words = value if isinstance(value, list) else [value]
            return self.option.parse(" ".join(map(str, words)))
        return convert_value(self.hint, value, f"{source}: {self.name}")


@cache
def spec_fields() -> tuple[SpecField, ...]:
    """Return every field of the run spec, in the order of the definition."""
    return tuple(_fields_below(RunSpec, ()))


def _fields_below(kind: type, path: tuple[str, ...]) -> Iterator[SpecField]:
    hints = get_type_hints(kind)
    for each in fields(kind):
        nested = next((part for part in (hints[each.name], *get_args(hints[each.name])) if is_dataclass(part)), None)
        if isinstance(nested, type):
            yield from _fields_below(nested, (*path, each.name))
        elif OPTION in each.metadata:  # DataSpec.rows has no serialised form
            option: Option = each.metadata[OPTION]
            yield SpecField(option.name or each.name, (*path, each.name), hints[each.name], each.default, option)


def make_spec(values: Mapping[str, Any], *, infer: bool = False, source: str = "the run spec") -> RunSpec:
    """Return the run spec with these fields, by their flat names; all others have their defaults.

    Args:
        values: Values by flat name, such as ``{"model": "…", "prompt": "text", "layers": "0-11"}``.
        infer: Whether answers are generated.
        source: Where the values come from, for error messages.

    Raises:
        SpecError: If a name is unknown or a value has the wrong type.

    """
    known = {each.name: each for each in spec_fields() if infer or each.path[0] != "generation"}
    parts: dict[tuple[str, ...], dict[str, Any]] = {("data",): {}, ("data", "prompt"): {}, ("generation",): {}, (): {}}
    for name, value in values.items():
        each = known.get(name)
        if each is None:
            raise _unknown_field(name, known, source)
        if value == "" and each.hint is str:
            raise SpecError(f"--{name.replace('_', '-')}", expected="a name or a path", found="an empty text")
        parts[each.path[:-1]][each.path[-1]] = each.convert(value, source)
    if "model" not in values and "://" in str(values.get("output", "")):
        raise no_model(str(values["output"]))
    own = parts[("data",)]
    if "worker_id" not in own and "dataset_dir" not in own:
        own["worker_id"] = stream_file_number(own.get("dataset", "")) or 0
    data = DataSpec(**own, prompt=PromptSpec(**parts[("data", "prompt")]))
    generation = GenerationSpec(**parts[("generation",)]) if infer else None
    return RunSpec(**parts[()], data=data, generation=generation)


def no_model(place: str) -> SpecError:
    """Return the error of a run whose result goes to a bucket, a pod or a fleet, which needs a named model."""
    return SpecError(f"no model for {place}", expected="--model NAME", fix="use --model embedded to try spile out")


def _unknown_field(name: str, known: Iterable[str], source: str) -> SpecError:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    if not near and any(each.name == name for each in spec_fields()):
        return SpecError(f"{source}: {name} is a field of infer", fix="remove it, or use infer")
    fix = f"did you mean {near[0]}?" if near else "remove it; docs/cli.md lists the fields"
    return SpecError(f"{source} has an unknown field {name!r}", fix=fix)


@dataclass(frozen=True)
class BackfillSpec:
    """Taps to add to an existing dataset. None stands for the dataset's own value; any other value must equal it."""

    root: str
    taps: tuple[Tap, ...]
    model: str | None = None
    """The location of the dataset's model, if it is not the one in ``run.json``."""
    revision: str | None = None
    worker_id: int | None = None
    """One stream; None: all streams."""
    dtype: ComputeDtype = "auto"
    store_dtype: StoreDtype | None = None
    positions: str | None = None
    max_samples: int | None = None
    """The limit that the dataset was created with, if any."""
    statistics: bool | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    mesh_shape: tuple[int, int] | None = None
    device: Device = "auto"
