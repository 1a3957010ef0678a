"""Which stream next, and what becomes of a worker that ended: on an engine that is a script."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.launch.supervisor import ClusterCheck, Scheduler, SchedulerPolicy, StreamTask, WorkerEnd, slow_stream
from spile.store.snapshot import State, StreamView


class Script:
    """Each stream's attempts end as it says, in order; then with 0. A step of waiting is a second."""

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


def scheduler(engine: Script, count: int, said: list[str] | None = None, **more: object) -> Scheduler:
    policy = more.pop("policy", SchedulerPolicy())
    say = (said if said is not None else []).append
    return Scheduler(engine, tasks(count), policy=policy, log=say, clock=lambda: engine.now, **more)  # type: ignore[arg-type]


def test_the_longest_are_first_and_never_more_than_there_are_workers() -> None:
    engine = Script({}, workers=3)
    shuffled = [StreamTask(n, (), size) for n, size in enumerate([5, 50, 7, 90, 6])]
    outcome = Scheduler(engine, shuffled, clock=lambda: engine.now).run(lambda: 0)
    assert engine.started == [3, 1, 2, 4, 0]
    assert engine.most == 3
    assert (outcome.done, outcome.exit_code, outcome.attempts) == (5, 0, 5)


def test_a_lost_machine_is_no_error_however_often() -> None:
    engine = Script({0: [None] * 40})
    said: list[str] = []
    outcome = scheduler(engine, 2, said).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (0, 2)
    assert engine.started.count(0) == 41
    assert said[0] == "stream 0: its machine on host0 was lost; it continues on another"


def test_errors_of_its_own_are_counted_and_the_others_go_on() -> None:
    engine = Script({1: [1, 137, 1, 1, 1]})
    said: list[str] = []
    outcome = scheduler(engine, 4, said).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (1, 3)
    assert engine.started.count(1) == 4, "one, and three more"
    assert outcome.failed == {1: "exit code 1: the last line"}
    assert "stream 1: its worker on host1 ended with exit code 137: the last line; it continues in 10 s" in said


def test_an_attempt_that_lasted_starts_the_count_anew() -> None:
    engine = Script({0: [1] * 10})
    outcome = scheduler(engine, 1, policy=SchedulerPolicy(tries=1, pause=1.0, long_attempt=0.5)).run(lambda: 0)
    assert outcome.exit_code == 0


def test_one_refused_stream_is_given_up_and_two_end_the_run() -> None:
    one = Script({3: [2]})
    outcome = scheduler(one, 4).run(lambda: 0)
    assert (outcome.exit_code, outcome.done, one.started.count(3)) == (2, 3, 1)
    all_of_them = Script({number: [2] for number in range(8)}, workers=2)
    said: list[str] = []
    outcome = scheduler(all_of_them, 8, said).run(lambda: 0)
    assert (outcome.exit_code, outcome.done) == (2, 0)
    assert len(all_of_them.started) <= 3
    assert any("the command is at fault" in line for line in said)


def test_a_stream_of_somebody_elses_is_asked_for_again_later() -> None:
    engine = Script({0: [3] * 12})
    outcome = scheduler(engine, 1).run(lambda: 0)
    assert (outcome.exit_code, engine.started.count(0)) == (0, 13)


def test_one_request_stops_all_and_a_second_kills() -> None:
    engine = Script({})
    engine.stuck = {0, 1}
    outcome = scheduler(engine, 5).run(lambda: int(engine.now >= 3))
    assert (outcome.exit_code, outcome.interrupted, outcome.done) == (130, True, 0)
    assert sorted(engine.stopped) == [0, 1]
    assert engine.started == [0, 1], "nothing more was started"
    deaf = Script({})
    deaf.stuck = {0, 1}
    deaf.stop = lambda stream: None  # type: ignore[method-assign]
    assert scheduler(deaf, 5).run(lambda: int(deaf.now >= 3) + int(deaf.now >= 6)).interrupted
    assert deaf.killed == 1


def test_a_request_that_comes_when_all_is_done_changes_nothing() -> None:
    engine = Script({}, workers=1)
    assert scheduler(engine, 1).run(lambda: int(engine.now >= 1)).exit_code == 0


VIEW = StreamView(0, "tpu_0", State.WORKING, tokens_per_second=1000.0, seconds_left=600.0, host="a", age=1.0)


def test_a_silent_workers_stream_goes_to_another() -> None:
    engine = Script({})
    engine.stuck = {0}
    silent = replace(VIEW, age=200.0, host="lost")
    outcome = scheduler(engine, 1, observe=lambda _: {0: silent} if engine.now > 250 else {}).run(lambda: 0)
    assert (outcome.exit_code, engine.abandoned, engine.started) == (0, [0], [0, 0])
    assert engine.avoided[0] == {"lost"}


def test_a_heartbeat_from_before_this_attempt_is_no_silence() -> None:
    engine = Script({}, workers=1)
    old = replace(VIEW, age=5000.0)
    scheduler(engine, 1, observe=lambda _: {0: old}).run(lambda: 0)
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
    outcome = scheduler(engine, 3, observe=lambda _: views(1000.0, 1000.0, 100.0)).run(
        lambda: asked * int(engine.now > 30)
    )
    assert outcome.exit_code == (0 if elsewhere else 130)
    if elsewhere:
        assert engine.started.count(2) == 2
        assert engine.avoided[2] == {"host2"}


def test_nobody_is_moved_while_others_wait_or_for_little() -> None:
    assert slow_stream(views(1000.0, 900.0, 400.0).values(), views(1000.0, 900.0, 400.0).values(), 120.0) is None
    near = views(1000.0, 900.0, 100.0, left=60.0)
    assert slow_stream(near.values(), near.values(), 120.0) is None
    far = views(1000.0, 900.0, 100.0)
    assert slow_stream(far.values(), far.values(), 120.0) == far[2]
    assert slow_stream([], far.values(), 120.0) is None


@given(
    st.dictionaries(st.integers(0, 7), st.lists(st.sampled_from([None, 1, 2, 3, 130, 137, 0]), max_size=6)),
    st.integers(1, 5),
    st.integers(0, 60),
)
def test_whatever_happens_every_stream_ends_once(ends: dict[int, list[int | None]], workers: int, ask: int) -> None:
    engine = Script(ends, workers)
    outcome = scheduler(engine, 8).run(lambda: int(bool(ask) and engine.now >= ask))
    assert engine.running == {}
    assert engine.most <= workers
    assert outcome.attempts == len(engine.started)
    assert outcome.done + len(outcome.failed) <= 8
    if outcome.exit_code == 0:
        assert outcome.done == 8
    if not outcome.interrupted and not outcome.failed:
        assert outcome.exit_code == 0
