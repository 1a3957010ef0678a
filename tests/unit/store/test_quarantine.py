"""The search for a sample that kills workers: which samples are tried, blamed and quarantined."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.engines.supervisor import AttemptHistory, RestartAction, RestartPolicy
from spile.objects import open_folder
from spile.spec.ranges import Ranges
from spile.store.layout import SUSPECTS
from spile.store.quarantine import (
    CAREFUL_TRIALS,
    PARTS,
    VARIABLE,
    Supervision,
    Suspects,
    Trials,
    read_trials,
    resume_trials,
    section_size,
    write_trials,
)

KILLED = 137


@dataclass
class Stream:
    """A stream in memory, and workers that take the steps of :class:`spile.run.worker.StreamWork`."""

    samples: int
    poisoned: frozenset[int]
    rng: random.Random
    section: int
    broken: bool = False
    """Whether the machine is at fault: whatever is computed kills the worker."""
    stored: set[int] = field(default_factory=set)
    quarantined: dict[int, str] = field(default_factory=dict)
    record: Trials | None = None
    disruptions: float = 0.0

    def attempt(self, environment: dict[str, str]) -> int | None:
        """Run a worker; return its exit code, or None if its machine was lost."""
        done = Ranges.of({*self.stored, *self.quarantined})
        trials = resume_trials(self.record, Supervision.from_environment(environment), "id", done)
        recorded = self.record is not None or bool(Supervision.from_environment(environment).kills)
        self.record = trials if recorded else self.record
        healthy = False
        while True:
            done = Ranges.of({*self.stored, *self.quarantined})
            trials = trials.without(done)
            step = trials.choose(Ranges([(0, self.samples)]) - done, self.section)
            if step.kind == "done":
                return 0
            (first, *_) = step.samples
            if step.kind == "quarantine":
                assert first not in self.quarantined, "a sample is quarantined once"
                self.quarantined[first] = next(each.causes_text for each in trials.groups if first in each.samples)
                continue
            if step.kind == "trial":
                if len(step.samples) == 1 and self.stored and not healthy and self.broken:
                    return KILLED
                controlled = healthy or bool(self.stored)
                trials = self.record = trials.with_trial(step.samples, controlled=controlled)
            if self.rng.random() < self.disruptions:
                return self.disrupted(trials)
            part = list(step.samples)
            if step.kind == "rest":  # Without a trial, shards are committed as they are filled, in any order.
                part = part[: self.rng.randint(1, len(part))]
            if self.broken or self.poisoned.intersection(part):
                return KILLED
            self.stored |= set(part)
            healthy = True
            if step.kind == "trial":
                trials = self.record = trials.after_success()

    def disrupted(self, trials: Trials) -> int | None:
        """End a worker for a reason that is no sample's fault."""
        how = self.rng.choice([None, 130, 143, 1])
        if how in (130, 1) and trials.trial:
            self.record = replace(trials, trial=Ranges())  # This worker could still write.
        return how


@given(st.integers(0, 2**32), st.integers(1, 700), st.integers(0, 3), st.sampled_from([0.0, 0.05, 0.3]))
def test_exactly_the_poisoned_samples_are_quarantined(
    seed: int, samples: int, poisoned: int, disruptions: float
) -> None:
    """Machines are lost, workers are stopped and fail, and supervisors are replaced; healthy samples are all stored."""
    rng = random.Random(seed)
    chosen = frozenset(rng.sample(range(samples), min(poisoned, samples - 1)))
    stream = Stream(samples, chosen, rng, rng.choice([1, 16, 256]), disruptions=disruptions)
    supervision, policy, history = Supervision.begin(), RestartPolicy(), AttemptHistory()
    for _ in range(4000):
        stored = len(stream.stored)
        code = stream.attempt(supervision.environment())
        decision = policy.decide(history, code, seconds=1.0, committed=len(stream.stored) > stored)
        history = decision.history
        if code == 0:
            break
        if not disruptions:
            assert decision.action is RestartAction.RESTART, decision.reason
        supervision = supervision.after(code)
        if code is None:
            supervision = Supervision.begin()  # The supervisor was on that machine.
        if stream.disruptions and rng.random() < 0.02:
            stream.disruptions = 0.0
    else:
        raise AssertionError("the search does not end")
    assert set(stream.quarantined) == chosen
    assert stream.stored == set(range(samples)) - chosen
    assert all("killed by signal 9" in why for why in stream.quarantined.values())


@given(st.integers(0, 2**32), st.integers(2, 300))
def test_a_broken_machine_quarantines_nothing(seed: int, samples: int) -> None:
    """Everything is computed well, then every batch kills the worker, then the machine is repaired."""
    rng = random.Random(seed)
    stream = Stream(samples, frozenset({rng.randrange(samples)}), rng, 16)
    supervision = Supervision.begin()
    for broken in (False, True, False):
        stream.broken = broken
        for _ in range(rng.randint(1, 12)):
            supervision = supervision.after(stream.attempt(supervision.environment()))
            assert set(stream.quarantined) <= stream.poisoned


def killed(trials: Trials, how: str = "signal 9", done: Ranges = Ranges()) -> Trials:  # noqa: B008
    """What the next worker makes of it, under the same supervisor."""
    assert trials.launch == "t:0:0"
    return resume_trials(trials, Supervision("t", 1, 0, how), "id", done)


def test_a_group_is_divided_and_a_sample_is_convicted_after_three_ends() -> None:
    begin = resume_trials(None, Supervision("t"), "id", Ranges())
    assert begin.choose(Ranges([(0, 100)]), 10).kind == "rest", "no worker was killed"
    trials = killed(begin)
    assert (trials.groups, trials.careful) == ((), CAREFUL_TRIALS)
    step = trials.choose(Ranges([(0, 100)]), 64)
    assert step.samples == Ranges([(0, 64)])
    trials = killed(replace(trials.with_trial(step.samples), launch="t:0:0"))
    assert len(trials.groups) == PARTS
    assert [len(group.samples) for group in trials.groups] == [2] * PARTS
    assert trials.choose(Ranges([(0, 100)]), 64).samples == Ranges([(64, 100)]), "suspects come last"
    for controlled in (False, True, True):
        group = trials.groups[-1]
        trials = killed(replace(trials.with_trial(group.samples, controlled=controlled), launch="t:0:0"))
    last = trials.groups[-1]
    assert (len(last.samples), last.alone, last.must_be_quarantined) == (1, 2, True)
    assert last.causes_text == "worker killed by signal 9 four times"
    assert trials.choose(Ranges([(0, 100)]), 64).kind == "quarantine"


def test_who_is_blamed() -> None:
    trials = Trials("id", launch="t:0:0").with_trial(Ranges([(4, 5)]), controlled=True)
    one = (Suspects(Ranges([(4, 5)]), ("worker killed by signal 9",), 1),)
    assert killed(trials).groups == one
    assert killed(trials, "?").groups[0].causes == ("worker killed",)
    assert killed(trials, "").groups == (), "the last launch was not killed"
    for other in (Supervision("t", 0, 1), Supervision("u", 1, 0, "signal 9"), Supervision("t", 2, 0, "signal 9")):
        assert resume_trials(trials, other, "id", Ranges()).groups == (), "another launch was killed"
    assert resume_trials(trials, Supervision("t", 1, 0, "signal 9"), "new id", Ranges()).groups == ()
    assert killed(trials, done=Ranges([(0, 9)])).groups == (), "it was committed before the kill"
    assert killed(replace(trials, trial=Ranges())).groups == (), "between two trials"
    hung = resume_trials(replace(trials, ended="no result"), Supervision(), "id", Ranges())
    assert (hung.groups[0].causes, hung.ended) == (("no result",), "")


def test_the_supervisors_message(tmp_path) -> None:
    supervision = Supervision.begin()
    first = Supervision.from_environment(supervision.environment())
    supervision = supervision.after(139)
    second = Supervision.from_environment(supervision.environment())
    assert (second.killed_launch, second.cause) == (first.launch, "worker killed by signal 11")
    for code in (1, 143, 130, 129, None):
        supervision = supervision.after(code)
    third = Supervision.from_environment(supervision.environment())
    assert (third.kills, third.others, third.how, third.killed_launch) == (1, 5, "", "")
    for text in ("", "x", "t:1", "t:a:b:c", ":1:2:"):
        assert Supervision.from_environment({VARIABLE: text}) == Supervision()
    assert Supervision.from_environment({VARIABLE: "uid:2::?"}) == Supervision("uid", 2, 0, "?"), (
        "Kubernetes leaves out zeros"
    )


def test_the_record_is_read_as_it_was_written(tmp_path) -> None:
    folder = open_folder(str(tmp_path))
    assert read_trials(folder) is None
    groups = (Suspects(Ranges([(1, 3), (7, 8)]), ("a", "b"), 1),)
    trials = Trials("id", groups, 3, Ranges([(1, 3)]), True, "t:0:1", "hung")
    write_trials(folder, trials)
    assert read_trials(folder) == trials
    for damaged in (b"", b"[]", b"{", b'{"stream": 1}', b'{"groups": 7}'):
        folder.put(SUSPECTS, damaged)
        assert read_trials(folder) is None, damaged


@pytest.mark.parametrize(
    ("samples", "shards", "size"), [(0, 0, 256), (100, 50, 256), (9000, 3, 3000), (10**9, 9, 16384)]
)
def test_a_trial_in_the_order_of_the_stream_is_about_a_shard(samples: int, shards: int, size: int) -> None:
    assert section_size(samples, shards) == size
