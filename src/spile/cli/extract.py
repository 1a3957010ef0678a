"""``spile extract``: the main job."""

# No deferred annotations: they are the flags, which ``spile infer`` inherits.

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Self

from cyclopts import Group, Parameter

from spile.cli.pod import PodFlags
from spile.cli.shell.backfill_flags import BackfillFlags
from spile.cli.shell.defaults import GUIDES_MODEL, GUIDES_STREAMS, STREAM_FILE, settled
from spile.cli.shell.engine_flags import EngineFlags
from spile.cli.shell.flag import flag
from spile.cli.shell.log import log
from spile.errors import SpecError
from spile.objects.opening import is_remote
from spile.spec.phase import Phase
from spile.spec.positions import ALL
from spile.spec.run import (
    DEFAULT_ENCODER,
    EMBEDDED,
    Backend,
    ComputeDtype,
    DataSpec,
    LongPolicy,
    PromptKind,
    PromptSpec,
    RunSpec,
    StoreDtype,
    parse_mesh_shape,
)
from spile.spec.taps import TOP, parse_heads, parse_layers

if TYPE_CHECKING:
    from spile.worker.pod.identity import Identity
    from spile.worker.progress import Summary

__all__ = ["GCS_PREFIX", "HOW", "PROMPTS", "WHAT", "WHERE", "ExtractFlags", "extract", "run_flags", "worker"]

GCS_PREFIX = "activations"
"""The folder in a bucket that is named alone."""

WHAT = Group("What", sort_key=1)
PROMPTS = Group("Prompts", sort_key=2)
WHERE = Group("Where to", sort_key=3)
HOW = Group("How much at once (changes no number)", sort_key=4)


def _words(group: Group, text: str) -> Parameter:
    return flag(group, text, consume_multiple=True, negative="")


@Parameter(name="*")
@dataclass(frozen=True)
class ExtractFlags:
    """The flags of ``spile extract``."""

    model: Annotated[
        str | None,
        flag(
            WHAT,
            f"A model on the Hugging Face hub, a folder, or gs://… "
            f"[default: embedded for a try-out here; with a bucket, a pod or a worker's number {GUIDES_MODEL}]",
        ),
    ] = None
    revision: Annotated[str | None, flag(WHAT, "The hub model's branch, tag or commit.")] = None
    adapter: Annotated[str | None, flag(WHAT, "A LoRA adapter to merge: a folder, or a name on the hub.")] = None
    backend: Annotated[
        Backend, flag(WHAT, "Whose code runs the model; auto: torch for families that spile models does not list.")
    ] = "auto"
    same_numbers: Annotated[
        bool, flag(WHAT, "Continue a run of another backend: you declare their numbers equal.", negative="")
    ] = False
    dataset: Annotated[
        str | None,
        flag(
            WHAT,
            "JSONL or Parquet of ARC tasks, {text}, {messages} or {input_ids}, or a dataset of the hub. "
            f"[default: embedded for a try-out here; else {GUIDES_STREAMS} where it exists]",
        ),
    ] = None
    split: Annotated[
        str | None, flag(WHAT, "The hub dataset's split, or some of its rows: train[:1000]. [default: train]")
    ] = None
    config_name: Annotated[str | None, flag(WHAT, "The hub dataset's configuration.")] = None
    keep: Annotated[
        list[str] | None, _words(WHAT, "Fields of each row to store with its sample, such as label,source.")
    ] = None
    dataset_dir: Annotated[str | None, flag(WHAT, "A folder of streams; --worker-id 5 reads its stream_005.jsonl.")] = (
        None
    )
    worker_id: Annotated[
        int | None,
        flag(
            WHAT,
            "The stream's number: reads stream_005.jsonl, writes tpu_5/. "
            "[default: of a --dataset named stream_005.jsonl, 5; TPU_WORKER_ID; else 0]",
        ),
    ] = None
    expect_split: Annotated[
        str | None, flag(WHAT, "Refuse streams of any other split than this one; deploy gives it to its workers.")
    ] = None
    layers: Annotated[list[str] | None, _words(WHAT, "all, or 0-11,20, or 0 1 2. [default: all]")] = None
    taps: Annotated[
        list[str] | None, _words(WHAT, "Some of residual, attn, mlp, z …: docs/taps.md has all. [default: residual]")
    ] = None
    heads: Annotated[list[str] | None, _words(WHAT, "Of q, k, v, z only these, such as 0-3,7. [default: all]")] = None
    top_k: Annotated[int, flag(WHAT, "How many logits of each token --taps logits keeps.")] = TOP
    max_samples: Annotated[int | None, flag(WHAT, "Only the stream's first so many samples.")] = None

    prompt: Annotated[PromptKind, flag(PROMPTS, "What a line of the dataset is; auto looks at the first.")] = "auto"
    prompt_version: Annotated[str, flag(PROMPTS, "Which ARC prompt.")] = PromptSpec.version
    grid_encoder: Annotated[str, flag(PROMPTS, "How a grid is written.")] = DEFAULT_ENCODER
    predictions_per_task: Annotated[int, flag(PROMPTS, "Augmented variants of each ARC task.")] = 1
    column: Annotated[str, flag(PROMPTS, "The field with the text, or with the token ids.")] = "text"
    pack: Annotated[bool, flag(PROMPTS, "Cut documents into full windows.", negative="")] = False
    max_seq_length: Annotated[int, flag(PROMPTS, "Longer samples are cut or skipped.")] = 2048
    long: Annotated[LongPolicy, flag(PROMPTS, "What happens to samples that are longer.")] = "auto"
    seed: Annotated[int, flag(PROMPTS, "The seed of the augmentations.")] = 0

    output: Annotated[
        str | None, flag(WHERE, "Where the dataset is stored: a folder, gs://… or s3://… [default: ./activations]")
    ] = None
    output_dir: Annotated[str | None, flag(WHERE, "The same as --output; with a bucket, a local copy beside it.")] = (
        None
    )
    gcs_bucket: Annotated[str | None, flag(WHERE, "Store the dataset in this bucket, instead of --output.")] = None
    gcs_prefix: Annotated[str | None, flag(WHERE, f"The folder in that bucket. [default: {GCS_PREFIX}]")] = None
    upload_to_gcs: Annotated[
        bool | None,
        flag(WHERE, "Store it in that bucket; =False: do not. [default: where one is named]", negative=""),
    ] = None
    delete_local_after_upload: Annotated[bool, flag(WHERE, "Remove each local copy after its commit.", negative="")] = (
        False
    )
    store_dtype: Annotated[StoreDtype | None, flag(WHERE, "What rows are stored as. [default: bfloat16]")] = None
    positions: Annotated[
        str | None, flag(WHERE, "Which tokens' rows are stored: all, last, answer, or random:32. [default: all]")
    ] = None
    shard_size_gb: Annotated[float, flag(WHERE, "About how large a shard is.")] = 1.0
    commit_every: Annotated[
        float, flag(WHERE, "Commit what is computed at least every so many seconds; full shards at once.")
    ] = 60.0
    statistics: Annotated[
        bool | None, flag(WHERE, "Take mean, variance and norms of each tap while extracting. [default: on a CPU]")
    ] = None
    checkpointing: Annotated[bool, flag(WHERE, "--no-checkpointing starts over; refused where commits exist.")] = True
    overwrite: Annotated[bool, flag(WHERE, "With --no-checkpointing: remove what is there.", negative="")] = False
    checkpoint_dir: Annotated[str | None, flag(WHERE, "A folder that gets checkpoint_worker_N.json, for people.")] = (
        None
    )

    dtype: Annotated[ComputeDtype, flag(WHAT, "What the model computes in.")] = "auto"
    batch_size: Annotated[int | None, flag(HOW, "Rows per device at most; a row holds one long sample or several.")] = (
        None
    )
    batch_tokens: Annotated[int | None, flag(HOW, "Tokens per device, padding included.")] = None
    mesh_shape: Annotated[str | None, flag(HOW, "Devices as DATA,MODEL such as 16,16.")] = None

    def spec(self) -> RunSpec:
        """The run that these flags ask for."""
        if self.dataset_dir is not None and self.dataset is not None:
            raise SpecError("two datasets", expected="--dataset or --dataset-dir", found="both")
        prompt = PromptSpec(
            kind=self.prompt,
            encoder=self.grid_encoder,
            version=self.prompt_version,
            predictions_per_task=self.predictions_per_task,
            column=self.column,
            pack=self.pack,
        )
        data = DataSpec(
            dataset=self.dataset or EMBEDDED,
            dataset_dir=self.dataset_dir,
            worker_id=self._stream(),
            prompt=prompt,
            max_seq_length=self.max_seq_length,
            long=self.long,
            max_samples=self.max_samples,
            seed=self.seed,
            expect_split=self.expect_split,
            split=self.split,
            config_name=self.config_name,
            keep=tuple(" ".join(self.keep or []).replace(",", " ").split()),
        )
        output, local_copy = self._places()
        return RunSpec(
            model=self.model or EMBEDDED,
            revision=self.revision,
            adapter=self.adapter,
            backend=self.backend,
            same_numbers=self.same_numbers,
            data=data,
            output=output,
            local_copy=local_copy,
            delete_local_after_upload=self.delete_local_after_upload,
            layers=parse_layers(" ".join(self.layers or ["all"])),
            taps=tuple(self.taps or ["residual"]),
            heads=parse_heads(" ".join(self.heads or ["all"])),
            top_k=self.top_k,
            dtype=self.dtype,
            store_dtype=self.store_dtype or "bfloat16",
            positions=ALL if self.positions is None else self.positions,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            mesh_shape=None if self.mesh_shape is None else parse_mesh_shape(self.mesh_shape),
            shard_size_gb=self.shard_size_gb,
            commit_every=self.commit_every,
            statistics=self.statistics,
            checkpointing=self.checkpointing,
            overwrite=self.overwrite,
            checkpoint_dir=self.checkpoint_dir,
        )

    def stored_in(self, root: str) -> Self:
        """The same run with its rows in ``root``, wherever these flags say they go."""
        return replace(self, output=root, output_dir=None, gcs_bucket=None, upload_to_gcs=None)

    def _stream(self) -> int:
        """The stream's number: as given, else as the dataset's own name says."""
        if self.worker_id is not None:
            return self.worker_id
        named = STREAM_FILE.fullmatch(self.dataset or "") if self.dataset_dir is None else None
        return int(named[1]) if named else 0

    def _places(self) -> tuple[str, str | None]:
        """The dataset's home, and the folder of its local copy where the home is a bucket."""
        return self._home_and_copy("--output-dir", self.output_dir, "./activations")

    def _home_and_copy(self, flag: str, folder: str | None, default: str) -> tuple[str, str | None]:
        """``folder``, as ``flag`` gives it, is the home where no other is given, else the local copy of a bucket."""
        home = self._bucket_home()
        if home and self.output is not None:
            found = f"{self.output}, {home}"
            raise SpecError("--output and --gcs-bucket both given", expected="one of them", found=found)
        home = home or self.output
        if home is None:
            return folder or default, None
        if folder is not None and not is_remote(home):
            raise SpecError(f"{flag} beside --output", expected="a bucket, of which it is the local copy", found=home)
        return home, folder

    def _bucket_home(self) -> str | None:
        """Where --gcs-bucket says: its own folder, --gcs-prefix, or ``activations``."""
        if self.upload_to_gcs and not self.gcs_bucket:
            raise SpecError("--upload-to-gcs", expected="--gcs-bucket B beside it", found="no bucket")
        if not self.gcs_bucket or self.upload_to_gcs is False:
            return None
        bucket = self.gcs_bucket.removeprefix("gs://").strip("/")
        prefix = self.gcs_prefix if self.gcs_prefix is not None else "" if "/" in bucket else GCS_PREFIX
        return "gs://" + "/".join(part for part in (bucket, prefix.strip("/")) if part)


def extract(
    *,
    flags: ExtractFlags | None = None,
    pod: PodFlags | None = None,
    engine: EngineFlags | None = None,
    backfill: BackfillFlags | None = None,
    verbose: Annotated[bool, Parameter(negative="", help="Log more: devices, shapes, each commit.")] = False,
) -> int:
    """Run a model over a dataset and store its layers' activations, each sample exactly once.

    With no flag at all: the embedded model over the embedded ARC tasks, into ./activations. The same command
    resumes what an earlier one left. Every flag can also come from --config run.toml or a SPILE_* variable.
    """
    flags, pod = flags or ExtractFlags(), pod or PodFlags()
    if backfill is not None and backfill.asked:
        from spile.cli.backfill import add_taps

        return add_taps(backfill, flags, pod, verbose)
    if engine is not None and engine.asked:
        from spile.cli.engines import extract_on_engine

        return extract_on_engine(settled(flags, os.environ, log, every_stream=True), engine)
    return run_flags(flags, pod, verbose)


def worker(
    *,
    spec: Annotated[
        str,
        Parameter(
            help="The run spec: a file, or an object of a bucket. - reads standard input.", allow_leading_hyphen=True
        ),
    ],
    stream: Annotated[int, Parameter(help="The number of the stream.")],
    pod: PodFlags | None = None,
    verbose: Annotated[bool, Parameter(negative="", help="Log more: devices, shapes, each commit.")] = False,
) -> int:
    """Run one stream of a run spec, as spile extract or spile infer wrote it to spec.json. Launchers start this.

    The spec says everything else. Exit codes: 0 success, 1 failure, 2 a mistake in the spec, 3 fenced by another
    worker, 130 interrupted; what was done is committed, and the same command resumes.
    """
    pod = pod or PodFlags()
    return run_stream(_read_spec(spec).for_stream(stream), pod, pod.identity(), verbose)


def _read_spec(location: str) -> RunSpec:
    from spile.store.stream import read_spec

    if location == "-":
        return RunSpec.from_json(sys.stdin.read(), "the spec on standard input")
    return read_spec(location)


def run_flags(flags: ExtractFlags, pod: PodFlags, verbose: bool) -> int:
    """Run the stream that the flags of extract or infer name, and return the exit code."""
    flags.spec()  # Report a mistake before looking for a pod or waiting for its other hosts.
    identity = pod.identity()
    spec = settled(flags, os.environ, log, pod=identity.count > 1).spec()
    return run_stream(spec, pod, identity, verbose)


def run_stream(spec: RunSpec, pod: PodFlags, identity: "Identity", verbose: bool) -> int:
    """Run one stream with a progress display, and return the exit code."""
    from spile.view.worker import watched
    from spile.worker.pod.check import log_devices
    from spile.worker.signals import end_soon

    if spec.generation is None:
        from spile.worker.extract import extract as run
    else:
        from spile.worker.infer import infer as run
    with pod.joined(log, identity) as hosts, watched(verbose) as watch:
        if verbose:
            watch.progress.phase(Phase.LOOKING, "at the devices")
            log_devices(hosts, log)
        summary = run(spec, progress=watch.progress, stop=watch.stop, hosts=hosts)
        if hosts.first:
            if verbose:
                for span in watch.progress.timeline.spans():
                    log(str(span))
            watch.finish(summary, spec.data.max_samples)
            _log_lacking(spec, summary.stream)
            _log_answers(spec, summary)
        else:
            log(f"{hosts.name}: done; worker 0 has the summary")
    if summary.interrupted:
        end_soon(summary.exit_code)  # Do not wait for programs that are still being compiled.
    return summary.exit_code


def _log_answers(spec: RunSpec, summary: "Summary") -> None:
    """Print where the answers are, if all of them are there."""
    if spec.generation is not None and summary.complete and not summary.interrupted:
        log(f"{'answers':<11}  {spec.answers_dir or summary.stream}/predictions.jsonl")
        log(f"{'score':<11}  spile score {summary.root}")


def _log_lacking(spec: RunSpec, home: str) -> None:
    """A copy that began later than its dataset is said to be no whole one."""
    if spec.local_copy is None or spec.delete_local_after_upload:
        return
    from spile.objects import open_folder
    from spile.store.streams import lacking

    if found := lacking(open_folder(spec.local_copy), spec.data.worker_id):
        log(found.line(home))
