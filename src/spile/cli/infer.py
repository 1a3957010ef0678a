"""``spile infer``: answers and their activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.extract import HOW, PROMPTS, WHAT, WHERE, ExtractFlags, run_flags
from spile.cli.pod import PodFlags
from spile.cli.shell.flag import flag
from spile.errors import SpecError
from spile.spec.run import Capture, ExtractSpec, GenerationSpec, LongPolicy

__all__ = ["InferFlags", "infer"]

_HOME = "./inference"
_ANSWERS = Group("Answers", sort_key=2)


@Parameter(name="*")
@dataclass(frozen=True)
class InferFlags(ExtractFlags):
    """The flags of ``spile infer``: those of extract, and how answers are made."""

    dataset: Annotated[
        str | None,
        flag(WHAT, "JSONL or JSON of ARC tasks, JSONL of {text} or of {messages}. [default: as for extract]"),
    ] = None
    n_tasks: Annotated[int | None, flag(WHAT, "Only the first so many tasks, with all their variants.")] = None
    long: Annotated[LongPolicy, flag(PROMPTS, "A prompt longer than --max-seq-length is skipped, or cut.")] = "auto"
    max_seq_length: Annotated[int, flag(PROMPTS, "The longest prompt; an answer comes on top of it.")] = (
        ExtractFlags.max_seq_length
    )
    seed: Annotated[int, flag(PROMPTS, "The seed of the augmentations, and of what is drawn.")] = 0
    predictions_per_task: Annotated[int, flag(PROMPTS, "Augmented variants of each ARC task, which vote.")] = 1

    max_new_tokens: Annotated[int, flag(_ANSWERS, "The longest answer; a 30×30 grid takes 1,030 tokens.")] = 1100
    temperature: Annotated[float, flag(_ANSWERS, "0: always the likeliest token.")] = 0.0
    top_p: Annotated[float, flag(_ANSWERS, "Draw from the likeliest tokens that reach this together.")] = 1.0
    stop: Annotated[
        list[str] | None,
        flag(_ANSWERS, "Tokens that end an answer too, beside the model's own.", consume_multiple=True, negative=""),
    ] = None
    capture: Annotated[Capture, flag(_ANSWERS, "Which tokens' activations are stored.")] = "both"

    output: Annotated[
        str | None, flag(WHERE, f"Where the dataset is stored: a folder, gs://… or s3://… [default: {_HOME}]")
    ] = None
    activations_dir: Annotated[
        str | None, flag(WHERE, "The same as --output; with a bucket, a local copy beside it.")
    ] = None
    output_dir: Annotated[
        str | None,
        flag(
            WHERE,
            "A folder that gets predictions.jsonl and submission.json. [default: the stream's folder in the dataset]",
        ),
    ] = None
    batch_size: Annotated[int | None, flag(HOW, "Answers at a time per data-parallel device.")] = None

    def spec(self) -> ExtractSpec:
        """The run that these flags ask for."""
        if self.n_tasks is not None and self.max_samples is not None:
            raise SpecError("two limits", expected="--n-tasks or --max-samples", found="both")
        if self.n_tasks is not None and self.n_tasks < 1:
            raise SpecError("--n-tasks", expected="at least 1", found=self.n_tasks)
        generation = GenerationSpec(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=tuple(self.stop or ()),
            capture=self.capture,
        )
        spec = super().spec()
        long = "skip" if self.long == "auto" else self.long
        spec = replace(spec, data=replace(spec.data, long=long), generation=generation, answers_dir=self.output_dir)
        if self.n_tasks is None:
            return spec
        return replace(spec, data=replace(spec.data, max_samples=self.n_tasks * self.predictions_per_task))

    def _places(self) -> tuple[str, str | None]:
        return self._home_and_copy("--activations-dir", self.activations_dir, _HOME)


def infer(
    *,
    flags: InferFlags | None = None,
    pod: PodFlags | None = None,
    verbose: Annotated[bool, Parameter(negative="", help="Log more: devices, shapes, each commit.")] = False,
) -> int:
    """Answer every prompt of a dataset, and store the activations of prompts and answers, each sample exactly once.

    With no flag at all: the embedded model over the embedded ARC tasks, into ./inference. The same command resumes what
    an earlier one left. spile score tells how many answers are right. Every flag can also come from --config run.toml
    or a SPILE_* variable.
    """
    return run_flags(flags or InferFlags(), pod or PodFlags(), verbose)
