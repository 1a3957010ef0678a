from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.data.arc.grids import passes_fast_check, task_problem

grids = st.tuples(st.integers(1, 30), st.integers(1, 30), st.randoms(use_true_random=False)).map(
    lambda t: [[t[2].randrange(10) for _ in range(t[1])] for _ in range(t[0])]
)
pairs = st.fixed_dictionaries({"input": grids, "output": grids})
tests = st.fixed_dictionaries({"input": grids}, optional={"output": grids})
tasks = st.fixed_dictionaries(
    {
        "task_id": st.text(alphabet="ab0 9_é,:", min_size=1, max_size=8),
        "train": st.lists(pairs, min_size=1, max_size=3),
        "test": st.lists(tests, min_size=1, max_size=3),
    }
)


@given(task=tasks)
def test_sound_tasks_are_proven_in_both_spellings(task: dict[str, Any]) -> None:
    def ordered(pair: dict[str, Any]) -> dict[str, Any]:
        return {key: pair[key] for key in ("input", "output") if key in pair}

    parts = {part: [ordered(pair) for pair in task[part]] for part in ("train", "test")}
    task = {"task_id": task["task_id"], **parts}
    assert passes_fast_check(orjson.dumps(task)) == task["task_id"]
    assert passes_fast_check(json.dumps(task, ensure_ascii=False).encode()) == task["task_id"]


SMALL = {
    "task_id": "t1",
    "train": [{"input": [[1, 2], [3, 4]], "output": [[5]]}],
    "test": [{"input": [[0, 9]], "output": [[7]]}],
}


@settings(max_examples=15 * settings.default.max_examples, deadline=None)
@given(seed=st.integers(0, 2**32), spaced=st.booleans())
def test_what_is_proven_is_always_sound(seed: int, spaced: bool) -> None:
    """Randomly damaged bytes: a line that passes the fast check must parse to a valid task."""
    chance = random.Random(seed)
    raw = bytearray(json.dumps(SMALL).encode() if spaced else orjson.dumps(SMALL))
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(raw))
        kind = chance.randrange(4)
        if kind == 0:
            raw[place] = chance.choice(b'0123456789[]{},:" -.e\\nt')
        elif kind == 1:
            del raw[place]
        elif kind == 2:
            raw.insert(place, chance.choice(b'0123456789[]{},:" '))
        else:
            cut = chance.randrange(place, min(len(raw), place + 20))
            raw[place:place] = raw[place:cut]
    name = passes_fast_check(bytes(raw))
    if name is not None:
        row = orjson.loads(bytes(raw))
        assert row["task_id"] == name
        assert list(row) == ["task_id", "train", "test"]
        assert task_problem(row) is None


@pytest.mark.parametrize(
    "change",
    [
        ('"task_id":"t1"', '"task_id":"t\\u0041"'),
        ('"task_id":"t1"', '"task_id":""'),
        ('"task_id":"t1"', '"task_id":7'),
        ("[[5]]", "[[10]]"),
        ("[[5]]", "[[true]]"),
        ("[[5]]", '[["5"]]'),
        ("[[5]]", "[[5.0]]"),
        ("[[5]]", "[[-5]]"),
        ("[[5]]", "[[]]"),
        ("[[5]]", "[[5],[5,5]]"),
        ("[[5]]", "[[[5]]]"),
        ("[[5]]", "[[" + ",".join("5" * 31) + "]]"),
        ('"input":[[1', '"in put":[[1'),
        ('"output":[[5]]', '"outcome":[[5]]'),
        ("]}]}", "]}],}"),
        ("]}]}", ']}],"more":1}'),
    ],
)
def test_the_unusual_is_left_to_the_parser(change: tuple[str, str]) -> None:
    whole = orjson.dumps(SMALL).decode()
    assert passes_fast_check(whole.encode()) == "t1"
    assert change[0] in whole
    assert passes_fast_check(whole.replace(*change).encode()) is None
