"""The restart policy, and the supervisor on an engine that follows a script."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.engines.supervisor import (
    AttemptHistory,
    ClusterCheck,
    RestartAction,
    RestartPolicy,
    StreamTask,
    Supervisor,
    WorkerEnd,
    slow_stream,
)
from spile.store.snapshot import State, StreamView


class Script:
    """An engine whose attempts end with the given codes, then with 0. Each wait takes one second of its clock."""

    name = "script"

    def __init__(self, ends: Mapping[int, Iterable[int | None]], workers: int = 2, elsewhere: bool = True) -> None:
        self.workers, self.elsewhere = workers, elsewhere
        self._ends = {stream: list(codes) for stream, codes in ends.items()}
        self.now = 0.0
        self.running: dict[int, int | None] = {}
        self.started: list[int] = []
        self.stopped: list[int] = []
        self.abandoned: list[int] = []
        self.avoided: dict[int, set[str]] = {}
        self.most = self.killed = 0
        self.stuck: set[int] = set()

    def check(self, asked: ClusterCheck) -> None: ...
    def close(self) -> None: ...

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:
        assert task.stream not in self.running, "a stream has one worker"
        codes = self._ends.get(task.stream, [])
        self.running[task.stream] = codes.pop(0) if codes else 0
        self.started.append(task.stream)
        self.avoided[task.stream] = set(avoid)
        self.most = max(self.most, len(self.running))

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        self.now += 1.0
        ends = [n for n in self.running if n not in self.stuck][:1]
        return [WorkerEnd(n, self.running.pop(n), f"host{n}", "noise\nspile: the last line") for n in ends]

    def stop(self, stream: int) -> None:
        self.stopped.append(stream)
        self.stuck.discard(stream)
        self.running[stream] = 130

    def abandon(self, stream: int) -> None:
        self.abandoned.append(stream)
        self.stuck.discard(stream)
        del self.running[stream]

    def kill(self) -> None:
        self.killed += 1
        self.stuck.clear()


def tasks(count: int) -> list[StreamTask]:
    return [StreamTask(n, ("extract", str(n)), size=100 - n) for n in range(count)]


def supervisor(engine: Script, count: int, output: list[str] | None = None, **more: object) -> Supervisor:
    policy = more.pop("policy", RestartPolicy())
    say = (output if output is not None else []).append
    return Supervisor(engine, tasks(count), policy=policy, log=say, clock=lambda: engine.now, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "history", "action", "pause", "after"),
    [
        (0, AttemptHistory(3, 3, 3), RestartAction.DONE, 0.0, AttemptHistory(3, 3, 3)),
        (2, AttemptHistory(), RestartAction.REFUSED, 0.0, AttemptHistory()),
        (1, AttemptHistory(), RestartAction.RESTART, 5.0, AttemptHistory(errors=1)),
        (137, AttemptHistory(errors=2), RestartAction.RESTART, 20.0, AttemptHistory(errors=2, kills=1)),
        (139, AttemptHistory(kills=11), RestartAction.RESTART, 20.0, AttemptHistory(kills=12)),
        (137, AttemptHistory(kills=12), RestartAction.GIVE_UP, 20.0, AttemptHistory(kills=13)),
        (1, AttemptHistory(errors=3), RestartAction.GIVE_UP, 40.0, AttemptHistory(errors=4)),
        (3, AttemptHistory(errors=3), RestartAction.RESTART, 5.0, AttemptHistory(errors=3, fences=1)),
        (3, AttemptHistory(fences=30), RestartAction.GIVE_UP, 5.0, AttemptHistory(fences=31)),
        (None, AttemptHistory(errors=3), RestartAction.RESTART, 0.0, AttemptHistory(errors=3, losses=1)),
        (143, AttemptHistory(losses=4), RestartAction.RESTART, 0.0, AttemptHistory(losses=5)),
        (4, AttemptHistory(errors=3), RestartAction.RESTART, 0.0, AttemptHistory(errors=3, losses=1)),
        (None, AttemptHistory(losses=5), RestartAction.GIVE_UP, 0.0, AttemptHistory(losses=6)),
        (1, AttemptHistory(losses=5), RestartAction.RESTART, 5.0, AttemptHistory(errors=1)),
    ],
)
def test_the_policy(
    code: int | None, history: AttemptHistory, action: RestartAction, pause: float, after: AttemptHistory
) -> None:
    decision = RestartPolicy().decide(history, code, seconds=10.0)
    assert (decision.action, decision.pause, decision.history) == (action, pause, after)
    if code not in (0, 2):
        fresh = RestartPolicy().decide(history, code, seconds=900.0)
        assert fresh.action is RestartAction.RESTART, "a long attempt clears the history"
    if code is None:
        assert RestartPolicy().decide(history, code, seconds=10.0, committed=True).history.losses == 0


def test_the_longest_are_first_and_never_more_than_there_are_workers() -> None:
    engine = Script({}, workers=3)
    shuffled = [StreamTask(n, (), size) for n, size in enumerate([5, 50, 7, 90, 6])]
    outcome = Supervisor(engine, shuffled, clock=lambda: engine.now).run(lambda: 0)
    assert engine.started == [3, 1, 2, 4, 0]
    assert engine.most == 3
    assert (outcome.done, outcome.exit_code, outcome.attempts) == (5, 0, 5)


def growing(engine: Script) -> dict[int, StreamView]:
    """Return a view with one more commit at each call."""
    engine.looks = getattr(engine, "looks", 0) + 1  # type: ignore[attr-defined]
    return {0: replace(VIEW, committed=engine.looks, age=None)}  # type: ignore[attr-defined]


def test_a_machine_lost_after_a_commit_is_no_error_however_often() -> None:
    engine = Script({0: [None] * 40})
    output: list[str] = []
    outcome = supervisor(engine, 2, output, observe=lambda _: growing(engine)).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (0, 2)
    assert engine.started.count(0) == 41
    assert output[0] == "stream 0: its machine on host0 was lost; it continues on another"
    assert StreamTask(0, ("verify",)).label == "stream 0"
    assert StreamTask(0, ("verify",), name="part 0-3").label == "part 0-3"


def test_a_stream_that_is_lost_again_and_again_without_a_commit_is_given_up() -> None:
    engine = Script({1: [None] * 40})
    outcome = supervisor(engine, 4).run(lambda: 0)
    assert (outcome.exit_code, outcome.done, engine.started.count(1)) == (1, 3, 6)
    assert outcome.failed[1].startswith("its machine was lost 6 times in a row and nothing was committed. Let workers")


def test_a_cluster_that_loses_every_worker_ends_the_run() -> None:
    engine = Script({number: [None] * 40 for number in range(16)}, workers=4)
    output: list[str] = []
    outcome = supervisor(engine, 16, output).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (1, 0)
    assert output[-1] == "machines are lost before anything is committed, so the run is stopped"
    assert set(engine.started) <= set(range(5)), "the other streams are not tried"


def test_errors_of_one_stream_are_counted_and_the_others_continue() -> None:
    engine = Script({1: [1, 137, 1, 1, 1]})
    output: list[str] = []
    outcome = supervisor(engine, 4, output).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (1, 3)
    assert engine.started.count(1) == 5, "one, three more after errors, and one more after a kill"
    assert outcome.failed == {1: "exit code 1: the last line"}
    assert "stream 1: its worker on host1 ended with exit code 137: the last line; it continues in 10 s" in output


def test_a_long_attempt_resets_the_count() -> None:
    engine = Script({0: [1] * 10})
    outcome = supervisor(engine, 1, policy=RestartPolicy(retries=1, pause=1.0, long_attempt=0.5)).run(lambda: 0)
    assert outcome.exit_code == 0


def test_one_refused_stream_is_given_up_and_two_end_the_run() -> None:
    one = Script({3: [2]})
    outcome = supervisor(one, 4).run(lambda: 0)
    assert (outcome.exit_code, outcome.done, one.started.count(3)) == (2, 3, 1)
    all_of_them = Script({number: [2] for number in range(8)}, workers=2)
    output: list[str] = []
    outcome = supervisor(all_of_them, 8, output).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (2, 0)
    assert len(all_of_them.started) <= 3
    assert any("the command or the data is wrong" in line for line in output)


def test_a_stream_of_another_worker_is_requested_again_later() -> None:
    engine = Script({0: [3] * 12})
    outcome = supervisor(engine, 1).run(lambda: 0)
    assert (outcome.exit_code, engine.started.count(0)) == (0, 13)


def test_one_request_stops_all_and_a_second_kills() -> None:
    engine = Script({})
    engine.stuck = {0, 1}
    outcome = supervisor(engine, 5).run(lambda: int(engine.now >= 3))
    assert (outcome.exit_code, outcome.interrupted, outcome.done) == (130, True, 0)
    assert sorted(engine.stopped) == [0, 1]
    assert engine.started == [0, 1], "nothing more was started"
    deaf = Script({})
    deaf.stuck = {0, 1}
    deaf.stop = lambda stream: None  # type: ignore[method-assign]
    assert supervisor(deaf, 5).run(lambda: int(deaf.now >= 3) + int(deaf.now >= 6)).interrupted
    assert deaf.killed == 1


def test_a_request_that_comes_when_all_is_done_changes_nothing() -> None:
    engine = Script({}, workers=1)
    assert supervisor(engine, 1).run(lambda: int(engine.now >= 1)).exit_code == 0


VIEW = StreamView(0, "tpu_0", State.WORKING, tokens_per_second=1000.0, seconds_left=600.0, host="a", age=1.0)


def test_a_silent_workers_stream_goes_to_another() -> None:
    engine = Script({})
    engine.stuck = {0}
    silent = replace(VIEW, age=200.0, host="lost")
    outcome = supervisor(engine, 1, observe=lambda _: {0: silent} if engine.now > 250 else {}).run(lambda: 0)
    assert (outcome.exit_code, engine.abandoned, engine.started) == (0, [0], [0, 0])
    assert engine.avoided[0] == {"lost"}


def test_a_heartbeat_from_before_this_attempt_is_no_silence() -> None:
    engine = Script({}, workers=1)
    old = replace(VIEW, age=5000.0)
    supervisor(engine, 1, observe=lambda _: {0: old}).run(lambda: 0)
    assert engine.abandoned == []


def views(*rates: float, left: float = 600.0) -> dict[int, StreamView]:
    return {
        n: replace(VIEW, number=n, tokens_per_second=rate, seconds_left=left, host=f"host{n}")
        for n, rate in enumerate(rates)
    }


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_slow_workers_rest_goes_to_a_free_one(elsewhere: bool) -> None:
    engine = Script({}, workers=4, elsewhere=elsewhere)
    engine.stuck = {2}
    asked = 0 if elsewhere else 1
    outcome = supervisor(engine, 3, observe=lambda _: views(1000.0, 1000.0, 100.0)).run(
        lambda: asked * int(engine.now > 30)
    )
    assert outcome.exit_code == (0 if elsewhere else 130)
    if elsewhere:
        assert engine.started.count(2) == 2
        assert engine.avoided[2] == {"host2"}


def test_no_stream_is_moved_while_others_wait_or_for_a_small_gain() -> None:
    assert slow_stream(views(1000.0, 900.0, 400.0).values(), views(1000.0, 900.0, 400.0).values()) is None
    near = views(1000.0, 900.0, 100.0, left=60.0)
    assert slow_stream(near.values(), near.values()) is None
    far = views(1000.0, 900.0, 100.0)
    assert slow_stream(far.values(), far.values()) == far[2]
    assert slow_stream([], far.values()) is None


@given(
    st.dictionaries(st.integers(0, 7), st.lists(st.sampled_from([None, 1, 2, 3, 130, 137, 0]), max_size=6)),
    st.integers(1, 5),
    st.integers(0, 60),
)
def test_every_stream_ends_once_after_any_events(ends: dict[int, list[int | None]], workers: int, ask: int) -> None:
    engine = Script(ends, workers)
    outcome = supervisor(engine, 8).run(lambda: int(bool(ask) and engine.now >= ask))
    assert engine.running == {}
    assert engine.most <= workers
    assert outcome.attempts == len(engine.started)
    assert outcome.done + len(outcome.failed) <= 8
    if outcome.exit_code == 0:
        assert outcome.done == 8
    if not outcome.interrupted and not outcome.failed:
        assert outcome.exit_code == 0
