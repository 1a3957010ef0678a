"""Write the tables of docs/taps.md and docs/models.md that are generated from tables in the code.

python scripts/make_model_tables.py          (--check: only report whether they are up to date)
"""

from __future__ import annotations

import sys
from pathlib import Path

from spile.models.families import FAMILIES
from spile.spec.taps import SITES

DOCS = Path(__file__).parent.parent / "docs"
_BEGIN, _END = "<!-- made by scripts/make_model_tables.py -->", "<!-- end -->"
_SHAPES = {"d_mid": "d_model", "top": "k"}


def tap_table() -> str:
    """Return the table of tap kinds."""
    titles = ("tap", "shape of a row", "what it is", "TransformerLens", "nnsight", "Hugging Face")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, spec in SITES.items():
        shape = " × ".join(_SHAPES.get(size, size) for size in spec.shape)
        where = f"`{name}.L`" if spec.layered else f"`{name}`"
        lens = spec.lens.replace("{i}", "L")
        lens = f"`{lens}`" if "hook" in lens else lens
        hugging_face = spec.hugging_face.replace("{i}", "L").replace("[i", "[L")
        nnsight = spec.nnsight.replace("[i]", "[L]")
        lines.append(f"| {where} | {shape} | {spec.definition} | {lens} | {nnsight} | {hugging_face} |")
    return "\n".join(lines)


def family_table() -> str:
    """Return the table of model families."""
    rows = [f"| `{name}` | {row.models} | {row.differs} |" for name, row in FAMILIES.items()]
    return "\n".join(["| family | models | what it does where others do not |", "|---|---|---|", *rows])


def main() -> None:
    """Write each table between its markers."""
    stale = []
    for name, table in {"taps.md": tap_table(), "models.md": family_table()}.items():
        page = DOCS / name
        text = page.read_text()
        before, rest = text.split(_BEGIN, 1)
        fresh = f"{before}{_BEGIN}\n\n{table}\n\n{_END}{rest.split(_END, 1)[1]}"
        if fresh != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(f"{', '.join(stale)}: run python scripts/make_model_tables.py")


if __name__ == "__main__":
    main()
