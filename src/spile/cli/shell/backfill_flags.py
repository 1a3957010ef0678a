"""The flags that add taps to a dataset that is finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.errors import SpecError
from spile.spec.run import BackfillSpec, parse_mesh_shape, parse_taps

if TYPE_CHECKING:
    from spile.cli.flags import ExtractFlags

__all__ = ["BackfillFlags"]

_ADD = Group("Add to a finished dataset", sort_key=7)
_TAKEN = frozenset(
    {"model", "revision", "worker_id", "dtype", "store_dtype", "positions", "max_samples", "statistics",
     "batch_size", "batch_tokens", "mesh_shape"}
)  # fmt: skip
"""The flags of extract that mean something beside --add-taps; all others are the dataset's own."""


@Parameter(name="*")
@dataclass(frozen=True)
class BackfillFlags:
    """Which taps, and to which dataset."""

    add_taps: Annotated[
        list[str] | None,
        Parameter(
            group=_ADD,
            help="Compute these for every row that --to holds, and store them beside it: mlp.12 residual.0",
            consume_multiple=True,
            negative="",
        ),
    ] = None
    to: Annotated[
        str | None, Parameter(group=_ADD, help="The finished dataset: a folder, gs://…, s3://… or az://…")
    ] = None

    @property
    def asked(self) -> bool:
        """Whether taps are to be added."""
        return self.add_taps is not None or self.to is not None

    def spec(self, flags: ExtractFlags) -> BackfillSpec:
        """What these flags ask for, beside those of extract."""
        if self.to is None or self.add_taps is None:
            found = "one of them"
            raise SpecError("--add-taps and --to", expected="both: the taps, and the finished dataset", found=found)
        given = flags.given()
        for name, value in given.items():
            if name not in _TAKEN:
                raise SpecError(
                    f"--{name.replace('_', '-')} cannot be used with --add-taps",
                    expected="the value that the dataset was created with",
                    found=value,
                    fix="leave it out",
                )
        if "mesh_shape" in given:
            given["mesh_shape"] = parse_mesh_shape(given["mesh_shape"])
        return BackfillSpec(root=self.to, taps=parse_taps(self.add_taps), **given)
