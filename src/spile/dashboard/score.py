"""A score as a picture: one page that holds everything, for any browser, offline."""

from __future__ import annotations

import json
from importlib import resources

from spile.data.arc.scoring import Score, TaskScore

__all__ = ["score_page"]

_TEMPLATE = "score_page.html"


def score_page(score: Score, title: str) -> str:
    """The page: every task with its examples, what was expected and what was answered."""
    summary = {name: value for name, value in score.record().items() if name != "by_task"}
    data = {"title": title, "summary": summary, "tasks": [_task(task) for task in score.tasks]}
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # no text of a task ends the script
    template = (resources.files("spile.dashboard") / _TEMPLATE).read_text(encoding="utf-8")
    return template.replace("__DATA__", text)


def _task(task: TaskScore) -> dict[str, object]:
    known = task.task
    return {
        "id": task.answers.task_id,
        "state": "unscored" if task.expected is None else "right" if task.right else "wrong",
        "train": [] if known is None else [{"input": pair.input, "output": pair.output} for pair in known.train],
        "test": None if known is None else known.test[0],
        "expected": task.expected,
        "attempts": list(task.answers.grids[:2]),
        "votes": list(task.answers.votes[:2]),
        "predictions": task.answers.predictions,
        "unreadable": task.answers.unreadable,
    }
