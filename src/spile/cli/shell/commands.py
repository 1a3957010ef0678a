"""Every command: its name, its function as an import path, and its line in ``spile --help``.

The functions are named, not imported, so that ``spile --help`` costs nothing but this table.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "GROUPS", "SECTIONS", "Command"]


class Command(NamedTuple):
    """A row of the table."""

    name: str
    """Words separated by a blank: ``data convert`` is ``convert`` in the group ``data``."""
    function: str
    help: str


GROUPS: dict[str, str] = {
    "fleet": "Deployed fleets: list, status, stop.",
    "tpu": "A fleet's machines: create, delete, status, list, recreate-preempted.",
    "pod": "Many hosts as one worker.",
    "data": "Make datasets: convert, split into streams, upload.",
    "docker": "The same run in containers: build, run, pod, stop.",
    "k8s": "The same run on Kubernetes.",
    "slurm": "The same run on Slurm.",
}

SECTIONS: dict[str, tuple[str, ...]] = {
    "A dataset of activations": (
        "extract",
        "infer",
        "score",
        "verify",
        "monitor",
        "plan",
        "inspect",
        "models",
        "export",
        "import",
        "bench",
    ),
    "What it is made from": ("data",),
    "Many machines": (
        "deploy",
        "fleet",
        "tpu",
        "pod",
        "worker",
        "install",
        "run",
        "logs",
        "collect",
        "docker",
        "k8s",
        "slurm",
    ),
}
"""The order of ``spile --help``: what most come for first."""

COMMANDS: tuple[Command, ...] = (
    Command("extract", "spile.cli.extract:extract", "Run a model over a dataset and store its activations."),
    Command("infer", "spile.cli.extract:infer", "Answer prompts, and store the activations of prompts and answers."),
    Command("worker", "spile.cli.extract:worker", "Run one stream of a run spec; launchers start this."),
    Command("score", "spile.cli.score:score", "How many answers are right, as a table and as a page of grids."),
    Command("verify", "spile.cli.verify:verify", "Prove a dataset complete: every sample once, every checksum."),
    Command(
        "monitor", "spile.cli.monitor:monitor", "Watch a dataset grow: samples, shards, state and rate of each stream."
    ),
    Command(
        "plan", "spile.cli.plan:plan", "Before a run: tokens, bytes, hours, dollars, and whether it fits in memory."
    ),
    Command("inspect", "spile.cli.inspect:inspect", "What a dataset is and holds; --html draws it as a page."),
    Command(
        "models", "spile.cli.models:models", "The model families that spile computes itself, each with a worked size."
    ),
    Command("export", "spile.cli.export:export", "A dataset as pickles, for SAELens, NumPy, Parquet or Hugging Face."),
    Command("import", "spile.cli.export:import_", "The old guides' pickles as a dataset."),
    Command("pod check", "spile.cli.pod:check", "Test a slice in a minute: roll call, barriers, devices, a forward."),
    Command("data convert", "spile.cli.data:convert", "A dataset of the hub, or local files, to ARC tasks."),
    Command("data streams", "spile.cli.data:streams", "Split a dataset into independent, balanced streams."),
    Command("data upload", "spile.cli.data:upload", "Put streams into a bucket, skipping what is there."),
    Command(
        "run",
        "spile.cli.run:run",
        "Copy this directory to every host of a slice, run a command on all, bring back logs.",
    ),
    Command("install", "spile.cli.install:install", "Put this very version of spile onto every host of a slice."),
    Command("logs", "spile.cli.logs:logs", "A worker's log: from its machine, or its last lines from the bucket."),
    Command("collect", "spile.cli.collect:collect", "Bring back what hosts keep locally, one folder per worker."),
    Command("bench", "spile.cli.bench:bench", "Measure this machine against its own limits."),
    Command("tpu create", "spile.cli.tpu:create", "Make a fleet's machines in many zones."),
    Command("tpu delete", "spile.cli.tpu:delete", "Delete a fleet's machines."),
    Command("tpu status", "spile.cli.tpu:status", "Show a fleet's machines."),
    Command("tpu list", "spile.cli.tpu:list_all", "List every TPU VM of the project."),
    Command("tpu recreate-preempted", "spile.cli.tpu:recreate_preempted", "Replace a fleet's dead machines."),
    Command("fleet list", "spile.cli.fleet:list_fleets", "The fleets that were deployed to a bucket."),
    Command("fleet status", "spile.cli.fleet:status", "One look at a fleet: its machines, its work, its bill."),
    Command("fleet stop", "spile.cli.fleet:stop", "End a fleet for good: its machines go, what is stored stays."),
    Command("deploy", "spile.cli.deploy:deploy", "Data, code and workers onto a fleet of TPU VMs."),
    Command("docker build", "spile.cli.docker:build", "Build the container image, here or on every host."),
    Command("docker run", "spile.cli.docker:run", "Run a command in a container here."),
    Command("docker pod", "spile.cli.docker:pod", "One container on every host of a slice, as one run."),
    Command("docker stop", "spile.cli.docker:stop", "Stop containers, here or on every host."),
    Command("k8s job", "spile.cli.k8s:job", "Print the run as Kubernetes manifests."),
    Command("slurm job", "spile.cli.slurm:job", "Print the run as a Slurm array."),
)
