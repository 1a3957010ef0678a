"""The flags, variables, scripts and defaults of the old guides, translated to those of spile.

A flag is only renamed. Only the name of a script selects the guides' variables and defaults: other programs set
variables such as BATCH_SIZE, OUTPUT_DIR or TPU_WORKER_ID for their own purposes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spile.errors import SpecError, printable
from spile.spec.run import no_model, stream_file_number

if TYPE_CHECKING:
    from spile.cli.flags import RunFlags

FLAGS: dict[str, str] = {
    # guide 002, extract_activations.py; guide 001, run_extraction_worker.sh
    "--model-path": "--model",
    "--dataset-path": "--dataset",
    "--dataset-stream": "--dataset",
    "--layers-to-extract": "--layers",
    "--activation-type": "--taps",
    "--enable-checkpointing": "--checkpointing",
    # guide 002, convert_hf_dataset_to_arc_format
    "--dataset-name": "--dataset",
    "--column-name": "--column",
    "--output-filename": "--output",
    # guide 000, the pod's inference script
    "--tasks-file": "--dataset",
    "--activations-dir": "--output-dir",
    "--upload-to-cloud": "--upload-to-gcs",
    "--max-output-tokens": "--max-new-tokens",
    # guide 004, the pod's barriers
    "--barrier-controller-host": "--coordinator-address",
    "--host-id": "--process-id",
    # guide 001, deploy
    "--monitor-interval": "--interval",
    # guides 000 and 003, the name that gcloud uses
    "--accelerator-type": "--tpu-type",
}
"""Old flags (in lower case, with dashes instead of underscores) and the new names."""

SCRIPTS: dict[str, tuple[str, ...]] = {
    # guide 000
    "run-docker.sh": ("docker",),
    "transform_hf_to_arc.py": ("data", "convert"),
    "distributed_inference_with_activations.py": ("infer",),
    # guide 001
    "deploy_to_tpus.sh": ("deploy",),
    "run_extraction_worker.sh": ("extract",),
    "manage_tpus.sh": ("tpu",),
    "upload_dataset_streams_to_gcs.sh": ("data", "upload"),
    # guide 002
    "create_dataset_streams.py": ("data", "streams"),
    "convert_hf_to_arc_format.py": ("data", "convert"),
    "extract_activations.py": ("extract",),
    "launch_worker.sh": ("extract",),
    "check_all_workers.sh": ("monitor", "--once"),
    # guide 003
    "multihost_runner.py": ("run",),
    # guide 004
    "multihost_extract.py": ("extract",),
    "test_multihost_v5e64.sh": ("pod", "check", "--topology", "v5litepod-64"),
}
"""Scripts of the guides and the commands that replace them, so that a line of a guide can be pasted after ``spile``."""

OTHER_PROGRAMS: dict[str, str] = {
    "docker ps": "see what runs and its progress with: spile monitor",
    "docker logs": "use: spile logs",
    "docker images": "build the image with spile docker build; --tpu-prefix builds it on every host",
    "gcloud queued-resources create": "use: spile tpu create --queued --node-prefix P --node-count N",
    "gcloud queued-resources delete": "use: spile tpu delete --node-prefix P",
    "gcloud queued-resources": "use: spile tpu status",
    "gcloud ssh": "on every host, use spile run --tpu-prefix NAME -- …; for a worker's log, use: spile logs NAME",
    "gcloud scp": "copy this directory to every host with spile run, and fetch files from hosts with: spile collect",
    "gcloud create": "use: spile tpu create",
    "gcloud delete": "use: spile tpu delete",
    "gcloud describe-quota": "check what can be known in advance with: spile deploy --create-tpus --dry-run",
    "gcloud auth": "run it without spile; spile uses the credentials that gcloud stores",
    "gcloud config": "run it without spile; spile reads gcloud's project and zone",
    "gcloud": "use spile tpu, spile run, spile logs or spile collect",
    "gsutil": "give gs:// locations to spile itself; look at them with spile monitor and spile verify",
    "huggingface-cli": "give --model OWNER/NAME; spile downloads the model from the hub",
    "ssh-keygen": "use spile tpu create, which creates gcloud's key if there is none",
    "apt-get": "on every host, run: spile run --tpu-prefix NAME -- 'sudo apt-get …'",
    "pip": "install spile and its dependencies on every host with: spile install --tpu-prefix NAME",
    "run_distributed_docker.sh": "use: spile docker pod --tpu-prefix NAME --mount DIR:/app/model -- spile infer …",
    "multihost_docker_run.sh": "use spile docker build and spile docker pod; see docs/guides/containers.md",
    "launch_all_workers.sh": "use spile deploy, or on one cluster spile extract --engine ray",
    "setup_tpu_worker.sh": "spile deploy does it; by hand: spile install --tpu-prefix NAME, again with --force",
}
"""Other programs in the guides, by words of their command lines, and their replacements. The first match counts."""
_RUNNERS = frozenset({"python", "python3", "bash", "sh", "nohup", "sudo"})

_PIPES = ("/dev/fd/", "/proc/self/fd/")
"""Prefixes of the path that the shell passes for ``bash <(curl …)``."""

DROPPED = frozenset({"--enable-barrier-sync", "--is-barrier-server"})
"""Old switches that are dropped, because the behaviour is always on or found automatically."""

SWITCHES = frozenset(
    {
        "--checkpointing", "--create-tpus", "--delete-local-after-upload", "--internal-ip", "--monitor",
        "--preemptible", "--skip-dataset", "--skip-launch", "--upload-to-gcs", "--verbose", *DROPPED,
    }
)  # fmt: skip
"""Switches that the old scripts accept as ``--switch True`` and ``--switch False``; spile accepts ``--switch=True``."""

_TRUE = {"1", "true", "yes", "on"}


class Variable(NamedTuple):
    """An environment variable of the guides."""

    flag: str
    commands: tuple[str, ...] = ("extract", "infer", "deploy")
    unless: str = ""
    """A flag that expresses the same thing. If it is given, the variable is ignored."""


RUNS = ("extract", "infer", "deploy")
"""The commands that the guides' variables and defaults are for."""

VARIABLES: dict[str, Variable] = {
    "MODEL_PATH": Variable("--model"),
    "DATASET_DIR": Variable("--dataset-dir", unless="--dataset"),
    "OUTPUT_DIR": Variable("--output-dir", ("extract", "deploy"), unless="--output"),
    "CHECKPOINT_DIR": Variable("--checkpoint-dir"),
    "BATCH_SIZE": Variable("--batch-size"),
    "SHARD_SIZE_GB": Variable("--shard-size-gb"),
    "MAX_SEQ_LENGTH": Variable("--max-seq-length"),
    "MESH_SHAPE": Variable("--mesh-shape"),
    "UPLOAD_TO_GCS": Variable("--upload-to-gcs", unless="--output"),
    "GCS_BUCKET": Variable("--gcs-bucket"),
}
"""Variables of the guides' scripts. Each is ignored if its flag or the flag's SPILE_* variable is given."""


def translate(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command line with old flags renamed; that of a script also with the flags for its variables."""
    script, words = _script_to_command(words, environment)
    end = words.index("--") if "--" in words else len(words)  # Arguments after -- belong to another program.
    given = [_normalise_flag(word) for word in words[:end]]
    command = next((word for word in given if not word.startswith("-")), "")
    if command == "infer":
        kept = {"--activations-dir"}  # In infer it is a flag of its own, next to --output-dir for answers.
        ours = _rename_flags(given, {old: new for old, new in FLAGS.items() if old not in kept})
    else:
        ours = _rename_flags(_drop_answers_dir(_rename_version(given, command), command), FLAGS)
    if script == "deploy_to_tpus.sh":
        ours = _rename_flags(ours, {"--max-samples": "--max-samples-per-stream"})  # "Limit samples per stream"
    if script and command in RUNS:
        ours = [*ours, *_flags_from_variables(script, command, ours, environment), f"--guide-script={script}"]
    return ours + words[end:]


def _script_to_command(words: list[str], environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the script that a line of a guide names, and its command: ``./scripts/manage_tpus.sh list``: ``tpu list``.

    The name is empty if the line names no script of the guides.
    """
    first = next((place for place, word in enumerate(words) if word not in _RUNNERS), len(words))
    name = words[first].rpartition("/")[2] if first < len(words) else ""
    if first and words[first:] and words[first].startswith(_PIPES):
        raise SpecError(
            "a script that the shell fetched",
            fix="run_extraction_worker.sh is now: spile extract --gcs-bucket … --dataset …",
        )
    ours = set(words[: words.index("--")] if "--" in words else words)  # Arguments after -- belong to another program.
    others = [fix for line, fix in OTHER_PROGRAMS.items() if line.split()[0] == name and set(line.split()[1:]) <= ours]
    if others:
        raise SpecError(f"{name} is not a command of spile", fix=others[0])
    if name not in SCRIPTS:
        return "", words
    rest = words[first + 1 :]
    if name == "launch_worker.sh" and rest and rest[0].isdecimal():
        rest = ["--worker-id", *rest]
    if name == "check_all_workers.sh" and not rest:
        rest = _dataset_of_variables(environment)
        print(f"check_all_workers.sh of the guides: the dataset that their variables name, {rest[0]}", file=sys.stderr)
    return name, [*SCRIPTS[name], *rest]


def _dataset_of_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the dataset that the guides' variables name."""
    bucket, folder = (environment.get(name, "").strip() for name in ("GCS_BUCKET", "OUTPUT_DIR"))
    if bucket and environment.get("UPLOAD_TO_GCS", "").strip().lower() in _TRUE:
        return [f"gs://{bucket.removeprefix('gs://').strip('/')}/activations"]
    return [folder or "./activations"]


def _normalise_flag(word: str) -> str:
    """Normalise the name of a flag: ``--TPU_PREFIX=My_tpu`` → ``--tpu-prefix=My_tpu``."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-").lower() + equals + value


def _rename_version(words: list[str], command: str) -> list[str]:
    """Rename ``--version V`` of a command that creates machines: gcloud means the version of the TPU's software."""
    if command not in ("tpu", "deploy"):
        return words
    renamed = list(words)
    for place, word in enumerate(words):
        followed = place + 1 < len(words) and not words[place + 1].startswith("-")
        if word.startswith("--version=") or (word == "--version" and followed):
            renamed[place] = "--runtime-version" + word.removeprefix("--version")
    return renamed


def _drop_answers_dir(words: list[str], command: str) -> list[str]:
    """Drop guide 000's ``--output_dir`` for answers next to ``--activations_dir``."""
    names = [word.partition("=")[0] for word in words]
    if "--activations-dir" not in names or "--output-dir" not in names:
        return words
    if command == "extract":
        line = "spile: ignoring --output-dir, which is for answers; generate answers with spile infer"
        print(line, file=sys.stderr)
    place = names.index("--output-dir")
    return words[:place] + words[place + (1 if "=" in words[place] else 2) :]


def _rename_flags(words: list[str], flags: Mapping[str, str]) -> list[str]:
    """Rename old flags, and join the value of a switch to it."""
    renamed: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if renamed and renamed[-1] in SWITCHES and word.lower() in ("true", "false"):
            renamed[-1] += f"={word}"
        else:
            renamed.append(flags.get(name, name) + equals + value)
    return [word for word in renamed if word.partition("=")[0] not in DROPPED]


def _flags_from_variables(script: str, command: str, words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the flags that the guides' variables stand for, and print which variables are used."""
    given = {word.partition("=")[0] for word in words}
    values = {name: environment.get(name, "").strip() for name in VARIABLES}

    def is_given(flag: str) -> bool:
        return flag in given or f"SPILE_{flag[2:].replace('-', '_').upper()}" in environment

    values["UPLOAD_TO_GCS"] = "true" if values["UPLOAD_TO_GCS"].lower() in _TRUE else ""
    uploads = values["UPLOAD_TO_GCS"] or is_given("--upload-to-gcs")
    if command != "deploy" and (is_given("--output") or not uploads):
        values["GCS_BUCKET"] = ""  # Workers of the guides use it only if they upload; a fleet needs it always.
    used = {
        name: f"{flag}={values[name]}"
        for name, (flag, commands, unless) in VARIABLES.items()
        if values[name] and command in commands and not is_given(flag) and not (unless and is_given(unless))
    }
    shown = ", ".join(f"{name}={values[name]}" for name in used)
    print(
        printable(f"{script} of the guides is spile {command} with their defaults and variables: {shown or 'none set'}")
    )
    return list(used.values())


GUIDE_MODEL = "Qwen/Qwen2.5-0.5B"
GUIDE_STREAMS = "./data/streams"
GUIDE_DATASET = "barc0/200k_HEAVY_gpt4o-description-gpt4omini-code_generated_problems"
_WORKER = "TPU_WORKER_ID"


def with_guide_defaults(flags: RunFlags, environment: Mapping[str, str], log: Callable[[str], None]) -> RunFlags:
    """Return the flags with the model and the data of the guides filled in, if a script of the guides was named."""
    if flags.guide_script is None:
        return flags
    bucket = environment.get("GCS_BUCKET", "").strip()
    if bucket and not flags.gcs_bucket and flags.output is None:
        log(
            f"GCS_BUCKET={bucket} is not used, because UPLOAD_TO_GCS is not true: the activations stay on this "
            "machine. To store them in the bucket, set UPLOAD_TO_GCS=true or give --upload-to-gcs"
        )
    flags = with_guide_model(flags, log)
    if flags.dataset is not None or flags.dataset_dir is not None:
        return flags
    if not Path(GUIDE_STREAMS).is_dir():
        raise SpecError(
            f"no dataset for {flags.guide_script}",
            expected="--dataset FILE or --dataset-dir DIR",
            found=f"neither, and no {GUIDE_STREAMS} here",
            fix="give --dataset embedded to use the embedded tasks",
        )
    log(f"no dataset was given: using {GUIDE_STREAMS}, as in the guides")
    return flags.with_values(dataset_dir=GUIDE_STREAMS)


def with_guide_model(flags: RunFlags, log: Callable[[str], None]) -> RunFlags:
    """Return the flags with the guides' names of folders and, if none is given, their model.

    Raises:
        SpecError: No script of the guides and no model was named.
    """
    if flags.guide_script is not None:
        flags = flags.with_values(stream_names=flags.stream_names or "tpu")
    if flags.model is not None:
        return flags
    if flags.guide_script is None:
        raise no_model("a fleet")
    log(f"no model was given: using {GUIDE_MODEL}, as in the guides (--model embedded: the embedded one)")
    return flags.with_values(model=GUIDE_MODEL)


def with_worker_number(flags: RunFlags, environment: Mapping[str, str], log: Callable[[str], None]) -> RunFlags:
    """Return the flags with the stream that TPU_WORKER_ID names, if a script of the guides was named.

    Not for a pod, where the variable contains the number of the host.
    """
    if flags.guide_script is None or flags.worker_id is not None:
        return flags
    text = environment.get(_WORKER, "").strip()
    if text and not text.isdecimal():
        raise SpecError(_WORKER, expected="the stream's number", found=repr(text))
    number = stream_file_number(flags.dataset or "") if flags.dataset_dir is None else None
    if number is not None and text and int(text) != number:
        log(f"{_WORKER}={text} is ignored: {flags.dataset} is stream {number} (--worker-id overrides it)")
    if number is None and not text and flags.dataset_dir is not None:
        raise SpecError(
            "no stream was chosen", expected=f"--worker-id N or {_WORKER}", found=f"only {flags.dataset_dir}"
        )
    return flags if number is not None or not text else flags.with_values(worker_id=int(text))
