"""Runs of layers of one kind: a scan over their stacked weights, compiled once however many layers there are.

Where kinds take turns, as windows do in some families, a step of the scan is one such turn of several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spile.spec.architecture import ModelConfig
from spile.spec.taps import Tap
from spile.spec.tensors import layer_tensors

__all__ = ["LayerRun", "choose_runs", "layer_runs", "one_by_one", "tap_groups"]

_FEWEST = 3
"""Steps that are worth a scan."""
_LONGEST_TURN = 8
_STACK_BYTES = 4 << 30
"""What the layers' tensors of one name may take together: a host holds some of them while they are read."""


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers: ``steps`` turns of ``period`` layers each, the same kinds in each turn."""

    first: int
    period: int = 1
    steps: int = 1

    @property
    def stop(self) -> int:
        """The layer after its last."""
        return self.first + self.period * self.steps

    def at(self, place: int) -> range:
        """The layers at one place of the turn, in order."""
        return range(self.first + place, self.stop, self.period)


def one_by_one(n_layers: int) -> tuple[LayerRun, ...]:
    """No scan."""
    return tuple(LayerRun(layer) for layer in range(n_layers))


def choose_runs(config: ModelConfig, taps: Sequence[Tap], n_layers: int, itemsize: int) -> tuple[LayerRun, ...]:
    """What is compiled soonest for these taps, and is no slower: docs/performance.md has what was measured."""
    sizes = [tensor.size for layer in range(n_layers) for tensor in layer_tensors(config, layer).values()]
    return layer_runs(config, taps, n_layers, max(1, _STACK_BYTES // (max(sizes) * itemsize)))


def layer_runs(config: ModelConfig, taps: Sequence[Tap], n_layers: int, most: int) -> tuple[LayerRun, ...]:
    """The layers in as few runs as a look ahead from each run's first layer finds, of at most ``most`` steps."""
    kinds = [_kind(config, taps, layer) for layer in range(n_layers)]
    runs: list[LayerRun] = []
    first = 0
    while first < n_layers:
        every = (LayerRun(first, period, _repeats(kinds[first:], period)) for period in range(1, _LONGEST_TURN + 1))
        found = max((run for run in every if run.steps >= _FEWEST), key=lambda run: run.stop, default=LayerRun(first))
        run = replace(found, steps=min(found.steps, most))
        runs.append(run if run.steps >= _FEWEST else LayerRun(first))
        first = runs[-1].stop
    return tuple(runs)


def _kind(config: ModelConfig, taps: Sequence[Tap], layer: int) -> object:
    """What must be equal in all steps of a scan, besides the weights."""
    tapped = frozenset((tap.site, tap.heads) for tap in taps if tap.layer == layer)
    return config.windows[layer], tuple(layer_tensors(config, layer).items()), tapped


def _repeats(kinds: Sequence[object], period: int) -> int:
    """How often the first ``period`` kinds come, one turn right after the other."""
    steps = 1
    while kinds[steps * period : (steps + 1) * period] == kinds[:period]:
        steps += 1
    return steps


def tap_groups(taps: Sequence[Tap], runs: Sequence[LayerRun]) -> tuple[tuple[int, ...], ...]:
    """The taps by number, in groups that one array holds: what the steps of a scan give, in order, or one alone."""
    scanned = {layer: run for run in runs if run.steps > 1 for layer in range(run.first, run.stop)}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, tap in enumerate(taps):
        run = None if tap.layer is None else scanned.get(tap.layer)
        if run is None or tap.layer is None:
            groups[(number,)] = [number]
        else:
            groups.setdefault((run.first, (tap.layer - run.first) % run.period, tap.site, tap.heads), []).append(number)
    return tuple(tuple(sorted(group, key=lambda number: taps[number].layer or 0)) for group in groups.values())
