"""Write the table of docs/models.md from the table of model families in the code.

python scripts/make_model_tables.py          (--check: only report whether it is up to date)
"""

from __future__ import annotations

import sys
from pathlib import Path

from spile.models.families import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
_BEGIN, _END = "<!-- made by scripts/make_model_tables.py -->", "<!-- end -->"


def family_table() -> str:
    """Return the table of model families."""
    rows = [f"| `{name}` | {row.models} | {row.differs} |" for name, row in FAMILIES.items()]
    return "\n".join(["| family | models | what it does where others do not |", "|---|---|---|", *rows])


def main() -> None:
    """Write the table between its markers."""
    text = PAGE.read_text()
    before, rest = text.split(_BEGIN, 1)
    fresh = f"{before}{_BEGIN}\n\n{family_table()}\n\n{_END}{rest.split(_END, 1)[1]}"
    if "--check" not in sys.argv:
        PAGE.write_text(fresh)
    elif fresh != text:
        sys.exit(f"{PAGE.name}: run python scripts/make_model_tables.py")


if __name__ == "__main__":
    main()
