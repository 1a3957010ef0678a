from __future__ import annotations

import pytest
from bench.limits import BenchResult, bench

from spile.spec.run import DataSpec, RunSpec


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    folder = tmp_path_factory.mktemp("bench")
    spec = RunSpec(model="embedded", data=DataSpec(dataset="embedded"), output=str(folder), batch_tokens=2048)
    found = bench(spec, tokens=8000, compare=False, limit_bytes=8 << 20)
    assert list(folder.iterdir()) == []  # nothing is left behind
    return found


@pytest.mark.slow
def test_the_run_is_set_against_the_slowest_of_its_limits(result: BenchResult) -> None:
    assert result.tokens >= 8000
    assert result.slowest == min(result.limit_tokens, key=result.limit_tokens.__getitem__)
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)
    assert result.fraction == pytest.approx(result.tokens_per_second / result.limit_tokens[result.slowest])
    assert result.limits.device_to_host is None  # on a CPU rows are on the host already
    assert 0 < result.forward_of_matmul < 1
    assert 0 < result.padding < 0.5


@pytest.mark.slow
def test_programs_are_compiled_before_the_clock_runs(result: BenchResult) -> None:
    assert result.shapes > 0
    assert result.compile_seconds > 0
    assert result.naive_tokens_per_second is None


@pytest.mark.slow
def test_the_command_is_measured_as_people_start_it(result: BenchResult) -> None:
    for run in (result.cold, result.warm):
        assert run.tokens >= 8000
        assert 0 < run.wall.total <= run.seconds
        assert 0 < run.first_batch < run.seconds
        assert 1 <= run.programs <= 2


@pytest.mark.slow
def test_the_record_is_plain_json(result: BenchResult) -> None:
    record = result.record()
    assert record["limits"]["host_copy"] == result.limits.host_copy
    assert record["limit_tokens"] == result.limit_tokens
