from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.data.arc.encoders import ENCODERS, parse_encoder
from spile.data.arc.grids import grid_problem
from spile.errors import DataError, SpecError
from spile.spec.run import DEFAULT_ENCODER

EXPRESSIONS = [
    DEFAULT_ENCODER,
    "MinimalGridEncoder()",
    "GridWithSeparationEncoder('|')",
    "GridWithSeparationEncoder(symbol=' ')",
    "GridWithSeparationEncoder(', ')",
    "GridCodeBlockEncoder(MinimalGridEncoder())",
    "GridCodeBlockEncoder(base=RowNumberEncoder(GridWithSeparationEncoder(' ')))",
    "GridShapeEncoder(GridCodeBlockEncoder(RepeatNumberEncoder(n=3)))",
    "RepeatNumberEncoder()",
    "RowNumberEncoder(RepeatNumberEncoder(1))",
    "ReplaceNumberEncoder('abcdefghij')",
    "ReplaceNumberEncoder(symbols=['ba','bb','bc','c','d','e','f','g','h','``'])",
    "RowNumberEncoder(GridShapeEncoder(ReplaceNumberEncoder()))",
    "RowNumberEncoder(RowNumberEncoder(RowNumberEncoder(MinimalGridEncoder())))",
]


@st.composite
def grids(draw: st.DrawFn) -> list[list[int]]:
    rows, columns = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    cells = draw(st.binary(min_size=rows * columns, max_size=rows * columns))
    return [[cell % 10 for cell in cells[row * columns : (row + 1) * columns]] for row in range(rows)]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@given(grid=grids())
def test_every_encoder_reverses_every_grid(expression: str, grid: list[list[int]]) -> None:
    encoder = parse_encoder(expression)
    text = encoder.to_text(grid)
    assert not text.endswith("\n")
    assert encoder.to_grid(text) == grid


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_size_from_1x1_to_30x30(expression: str) -> None:
    encoder = parse_encoder(expression)
    for rows in range(1, 31):
        for columns in (1, 2, 9, 10, 11, 29, 30):
            grid = [[(row * 7 + column) % 10 for column in range(columns)] for row in range(rows)]
            assert encoder.to_grid(encoder.to_text(grid)) == grid


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_encoders_text_makes_it_again(expression: str) -> None:
    encoder = parse_encoder(expression)
    assert parse_encoder(str(encoder)) == encoder
    assert str(parse_encoder(f" {expression.replace('(', ' ( ')} ")) == str(encoder)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@given(text=st.text(alphabet="01 9|a\n`grid size2x", max_size=24))
def test_what_is_read_back_is_exactly_what_would_be_written(expression: str, text: str) -> None:
    encoder = parse_encoder(expression)
    try:
        grid = encoder.to_grid(text)
    except DataError:
        return
    assert encoder.to_text(grid) == text


def test_the_default_writes_a_size_and_row_numbers() -> None:
    assert parse_encoder(DEFAULT_ENCODER).to_text([[0, 1], [2, 3]]) == "size 2x2\n1 01\n2 23"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("NoSuchEncoder()", ["one of MinimalGridEncoder, ", *ENCODERS, "found NoSuchEncoder"]),
        ("RowNumberEncoder(Missing())", ["found Missing"]),
        ("RowNumberEncoder()", ["expected base: an encoder", "found nothing"]),
        ("RowNumberEncoder('x')", ["expected base: an encoder", "found 'x'"]),
        ("RowNumberEncoder(MinimalGridEncoder(), MinimalGridEncoder())", ["expected base: an encoder"]),
        ("MinimalGridEncoder(1)", ["expected nothing, found 1"]),
        ("MinimalGridEncoder", ["with parentheses", "found 'MinimalGridEncoder'"]),
        ("MinimalGridEncoder() x", ["found invalid syntax"]),
        ("MinimalGridEncoder(", ["found '(' was never closed"]),
        ("RepeatNumberEncoder(n=0)", ["n from 1 to 16, found 0"]),
        ("RepeatNumberEncoder(m=3)", ["expected n: a number, found m=3"]),
        ("RepeatNumberEncoder('3')", ["expected n: a number"]),
        ("GridWithSeparationEncoder('1')", ["no digit and no newline", "'1'"]),
        ("GridWithSeparationEncoder('')", ["no digit and no newline"]),
        ("ReplaceNumberEncoder('abc')", ["ten distinct symbols"]),
        ("ReplaceNumberEncoder('aacdefghij')", ["ten distinct symbols"]),
        ("ReplaceNumberEncoder('a cdefghij')", ["no digit or blank"]),
        ("ReplaceNumberEncoder(['a','ab','c','d','e','f','g','h','i','j'])", ["beginning of another"]),
        ("__import__('os').system('true')", ["with parentheses", "os"]),
        ("RowNumberEncoder(" * 40 + ")" * 40, ["at most 8 encoders inside each other"]),
        ("x" * 2000, ["at most 1000 characters, found 2000"]),
        (r"GridWithSeparationEncoder('\d')", ["invalid escape sequence"]),
        ("GridWithSeparationEncoder(*'|')", ["expected symbol: a string, found *'|'"]),
        ("GridWithSeparationEncoder(**{'symbol': '|'})", ["expected symbol: a string"]),
        ("RepeatNumberEncoder(True)", ["expected n: a number, found True"]),
        ("ReplaceNumberEncoder(['a', 1])", ["a list of strings"]),
        ("[" * 900, ["found"]),
        ("-" * 999, ["found"]),
        ("(" * 90 + ")" * 90, ["found"]),
        ("MinimalGridEncoder()()", ["with parentheses"]),
        (r"GridWithSeparationEncoder('\n')", ["no digit and no newline"]),
        ("", ["such as RowNumberEncoder", "found invalid syntax"]),
    ],
)
def test_a_bad_expression_is_refused_in_one_line(expression: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_encoder(expression)
    line = str(caught.value)
    assert line.startswith("--grid-encoder")
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        ([[0]], None),
        ([[9] * 30] * 30, None),
        ([], "not a list of rows"),
        ([[]], "empty rows"),
        ("12", "not a list of rows"),
        ([1, 2], "not a list of rows"),
        ([[1, 2], [3]], "ragged"),
        ([[0] * 31], "larger than 30×30"),
        ([[0]] * 31, "larger than 30×30"),
        ([[10]], "outside 0 to 9"),
        ([[-1]], "outside 0 to 9"),
        ([[300]], "outside 0 to 9"),
        ([["x"]], "not a number"),
        ([[1.0]], "not a number"),
        ([[None]], "not a number"),
        ([[True]], "not a number"),
    ],
)
def test_grids(grid: object, problem: str | None) -> None:
    found = grid_problem(grid)
    assert found is None if problem is None else problem in (found or "")
