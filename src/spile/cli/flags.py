"""Flags that several commands share. Those of a run derive from the fields of the run spec."""

# No deferred annotations: cyclopts reads them as the types of flags.

import types
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

from cyclopts import Group, Parameter

from spile.errors import SpecError
from spile.objects.opening import is_remote
from spile.spec.run import RunSpec, SpecField, make_spec, spec_fields

__all__ = ["GCS_PREFIX", "ExtractFlags", "InferFlags", "RunFlags"]

GCS_PREFIX = "activations"
"""The folder of the dataset in a bucket that is given without a folder."""

GROUPS = ("Model", "Data", "Taps", "Prompts", "Answers", "Output", "Batching (does not change the numbers)")
_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(GROUPS, 1)}


@dataclass(frozen=True)
class RunFlags:
    """The flags of a run. Each is None if it was not given; the run spec has the defaults."""

    if TYPE_CHECKING:

        def __init__(self, **flags: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def given(self) -> dict[str, Any]:
        """Return the flags that were given, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def values(self) -> dict[str, Any]:
        """Return the fields of the run spec that the flags ask for, by name.

        Raises:
            SpecError: If two flags exclude each other.
        """
        if self.dataset_dir is not None and self.dataset is not None:
            raise SpecError("two datasets", expected="--dataset or --dataset-dir", found="both")
        known = {each.name for each in spec_fields()}
        values = {name: value for name, value in self.given().items() if name in known}
        output, local_copy = self._places()
        if output is not None:
            values["output"] = output
        if local_copy is not None:
            values["local_copy"] = local_copy
        return values

    def spec(self) -> RunSpec:
        """Return the run spec that the flags ask for."""
        return make_spec(self.values(), source="flags")

    def stored_in(self, root: str) -> Self:
        """Return the flags of the same run with its output in ``root``."""
        return self.replaced(output=root, output_dir=None, local_copy=None, gcs_bucket=None, upload_to_gcs=None)

    def replaced(self, **changes: Any) -> Self:
        """Return these flags with some of them changed."""
        return replace(self, **changes)

    def _places(self) -> tuple[str | None, str | None]:
        return self._output_and_copy("--output-dir", self.output_dir)

    def _output_and_copy(self, flag: str, folder: str | None) -> tuple[str | None, str | None]:
        """Return the output, and the folder of the local copy if the output is a bucket.

        ``folder``, the value of ``flag``, is the output if no other is given; otherwise it is the local copy.
        """
        bucket = self._bucket()
        if bucket and self.output is not None:
            found = f"{self.output}, {bucket}"
            raise SpecError("--output and --gcs-bucket both given", expected="one of them", found=found)
        output = bucket or self.output
        if output is None:
            return folder, self.local_copy
        if folder is not None and not is_remote(output):
            raise SpecError(f"{flag} with --output", expected="a bucket, of which it is the local copy", found=output)
        return output, folder or self.local_copy

    def _bucket(self) -> str | None:
        """Return the folder that ``--gcs-bucket`` and ``--gcs-prefix`` name."""
        if self.upload_to_gcs and not self.gcs_bucket:
            raise SpecError("--upload-to-gcs", expected="--gcs-bucket as well", found="no bucket")
        if not self.gcs_bucket or self.upload_to_gcs is False:
            return None
        bucket = self.gcs_bucket.removeprefix("gs://").strip("/")
        prefix = self.gcs_prefix if self.gcs_prefix is not None else "" if "/" in bucket else GCS_PREFIX
        return "gs://" + "/".join(part for part in (bucket, prefix.strip("/")) if part)


class _AnswerFlags(RunFlags):
    """The flags of a run that generates answers."""

    def spec(self) -> RunSpec:
        return make_spec(self.values(), infer=True, source="flags")

    def values(self) -> dict[str, Any]:
        values = super().values()
        if self.output_dir is not None:
            values["answers_dir"] = self.output_dir
        if self.n_tasks is None:
            return values
        if self.max_samples is not None:
            raise SpecError("two limits", expected="--n-tasks or --max-samples", found="both")
        if self.n_tasks < 1:
            raise SpecError("--n-tasks", expected="at least 1", found=self.n_tasks)
        return {**values, "max_samples": self.n_tasks * (self.predictions_per_task or 1)}

    def _places(self) -> tuple[str | None, str | None]:
        return self._output_and_copy("--activations-dir", self.activations_dir)


def _flag(each: SpecField) -> tuple[str, Any, Any]:
    """Return the dataclass field of a flag: its name, its annotated type, and None as its default."""
    option, hint = each.option, _plain(each.hint)
    many = get_origin(hint) is tuple and each.name != "mesh_shape"
    kind = list[str] if many else str if get_origin(hint) is tuple else hint
    more: dict[str, Any] = {"consume_multiple": True, "negative": ""} if many else {}
    if hint is bool and each.default is False:
        more["negative"] = ""
    text = option.help + (f" [default: {default}]" if (default := _default_text(each)) else "")
    parameter = Parameter(group=_GROUPS[option.group], help=text, **more)
    return each.name, Annotated[kind | None, parameter], field(default=None)


def _default_text(each: SpecField) -> str:
    if each.option.default:
        return each.option.default
    if each.default in (None, False, (), ""):
        return ""
    return "yes" if each.default is True else str(each.default)


def _plain(hint: Any) -> Any:
    """Return a type without ``| None``."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(each for each in get_args(hint) if each is not type(None))
    return hint


def _guide(name: str, kind: Any, group: str, text: str, **more: Any) -> tuple[str, Any, Any]:
    return name, Annotated[kind | None, Parameter(group=_GROUPS[group], help=text, **more)], field(default=None)


_BUCKET = (
    _guide("gcs_bucket", str, "Output", "Store the dataset in this bucket, instead of --output."),
    _guide("gcs_prefix", str, "Output", f"The folder in that bucket. [default: {GCS_PREFIX}]"),
    _guide(
        "upload_to_gcs",
        bool,
        "Output",
        "Store the dataset in that bucket; =False: do not. [default: yes, if --gcs-bucket is given]",
        negative="",
    ),
)
"""Flags of the old guides, which :meth:`RunFlags.values` translates to ``output`` and ``local_copy``."""
_COPY = "The same as --output; with a bucket, the same as --local-copy."


def _make(name: str, base: type[RunFlags], infer: bool, *guides: tuple[str, Any, Any]) -> type[RunFlags]:
    own = [_flag(each) for each in spec_fields() if each.option.flag and (infer or each.option.group != "Answers")]
    made = make_dataclass(name, [*own, *guides, *_BUCKET], bases=(base,), frozen=True)
    made.__module__ = __name__
    return Parameter(name="*")(made)


if TYPE_CHECKING:

    class ExtractFlags(RunFlags):
        """The flags of ``spile extract``."""

    class InferFlags(RunFlags):
        """The flags of ``spile infer``."""

else:
    ExtractFlags = _make("ExtractFlags", RunFlags, False, _guide("output_dir", str, "Output", _COPY))
    InferFlags = _make(
        "InferFlags",
        _AnswerFlags,
        True,
        _guide("output_dir", str, "Answers", "The same as --answers-dir."),
        _guide("activations_dir", str, "Output", _COPY),
        _guide("n_tasks", int, "Data", "Stop after this many tasks, with all their variants."),
    )
