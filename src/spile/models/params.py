"""The weights as a tree of arrays, and runs of equal layers that are computed as one scan.

A scan over stacked weights is compiled once, however many layers it has. If kinds of layers alternate, as attention
windows do in some families, a step of the scan is one period of several layers. Matrices keep the layout of the files,
``[out, in]``, so that loading is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spile.models.architecture import Axes, ModelConfig, Tensor, layer_tensors, model_tensors
from spile.spec.taps import Tap

_MIN_STEPS = 3
"""The fewest steps for which a scan is worthwhile."""
_MAX_PERIOD = 8
_STACK_BYTES = 4 << 30
"""The largest stack of one tensor over the layers of a run; a host holds some of these while they are read."""


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers: ``steps`` periods of ``period`` layers each, with the same kinds in each period."""

    first: int
    period: int = 1
    steps: int = 1

    @property
    def stop(self) -> int:
        """The number of the layer after the last one."""
        return self.first + self.period * self.steps

    def at(self, place: int) -> range:
        """Return the layers at one place of the period, in order."""
        return range(self.first + place, self.stop, self.period)


def one_run_per_layer(n_layers: int) -> tuple[LayerRun, ...]:
    return tuple(LayerRun(layer) for layer in range(n_layers))


def choose_runs(config: ModelConfig, taps: Sequence[Tap], n_layers: int, itemsize: int) -> tuple[LayerRun, ...]:
    """Return the runs that compile fastest for these taps and are not slower (see docs/performance.md)."""
    sizes = [tensor.size for layer in range(n_layers) for tensor in layer_tensors(config, layer).values()]
    return layer_runs(config, taps, n_layers, max(1, _STACK_BYTES // (max(sizes) * itemsize)))


def layer_runs(config: ModelConfig, taps: Sequence[Tap], n_layers: int, max_steps: int) -> tuple[LayerRun, ...]:
    """Group the layers greedily into runs of at most ``max_steps`` steps."""
    kinds = [_kind(config, taps, layer) for layer in range(n_layers)]
    runs: list[LayerRun] = []
    first = 0
    while first < n_layers:
        every = (LayerRun(first, period, _repeats(kinds[first:], period)) for period in range(1, _MAX_PERIOD + 1))
        scans = (run for run in every if run.steps >= _MIN_STEPS)
        found = max(scans, key=lambda run: run.stop, default=LayerRun(first))
        run = replace(found, steps=min(found.steps, max_steps))
        runs.append(run if run.steps >= _MIN_STEPS else LayerRun(first))
        first = runs[-1].stop
    return tuple(runs)


def _kind(config: ModelConfig, taps: Sequence[Tap], layer: int) -> object:
    """Return everything besides the weights that must be equal in all steps of a scan."""
    tapped = frozenset((tap.kind, tap.heads, tap.top) for tap in taps if tap.layer == layer)
    return config.windows[layer], layer in config.no_rope, tuple(layer_tensors(config, layer).items()), tapped


def _repeats(kinds: Sequence[object], period: int) -> int:
    """Return how often the first ``period`` kinds are repeated without a gap."""
    steps = 1
    while kinds[steps * period : (steps + 1) * period] == kinds[:period]:
        steps += 1
    return steps


def tap_groups(taps: Sequence[Tap], runs: Sequence[LayerRun]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the taps in groups that share one array: the steps of a scan, in order, or a single tap."""
    scanned = {layer: run for run in runs if run.steps > 1 for layer in range(run.first, run.stop)}
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, tap in enumerate(taps):
        run = None if tap.layer is None else scanned.get(tap.layer)
        if run is None or tap.layer is None or tap.gradient:
            groups[(number,)] = [number]
        else:
            place = (tap.layer - run.first) % run.period
            groups.setdefault((run.first, place, tap.kind, tap.heads, tap.top), []).append(number)
    return tuple(tuple(sorted(group, key=lambda number: taps[number].layer or 0)) for group in groups.values())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """The weights of one layer, or other leaves in the same tree; None if the model has no such tensor."""

    attn_norm: Any = None
    attn_norm_bias: Any = None
    q: Any = None
    k: Any = None
    v: Any = None
    o: Any = None
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None
    q_norm: Any = None
    k_norm: Any = None
    sinks: Any = None
    attn_post_norm: Any = None
    mlp_norm: Any = None
    mlp_norm_bias: Any = None
    gate: Any = None
    up: Any = None
    down: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    mlp_post_norm: Any = None
    router: Any = None
    """If a layer has a router, gate, up and down are those of all experts, stacked."""
    router_bias: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The weights up to the last layer that is needed, with the final norm and the LM head if logits are needed."""

    embed: Any
    layers: tuple[Layer, ...]
    """One entry per layer; of a run, one entry per place in its period, with the weights of all steps stacked."""
    positions: Any = None
    final_norm: Any = None
    final_norm_bias: Any = None
    head: Any = None
    """None, with a final norm: the head is the embedding."""
    head_bias: Any = None
    steering: Any = None
    """Changes of taps that the run asked for: a :class:`~spile.models.decoder.Steering`, or None."""


T = TypeVar("T")


def build(config: ModelConfig, n_layers: int | None, make: Callable[[str, Tensor], T], *, head: bool = False) -> Params:
    """Return a tree whose leaves are ``make(name, tensor)``, with names such as ``embed``, ``3.q_bias`` and ``head``.

    ``head``: with what logits need, the final norm and, unless it is the embedding, the LM head.
    """
    count = config.n_layers if n_layers is None else n_layers
    if not 0 < count <= config.n_layers:
        raise ValueError(f"n_layers: expected 1 to {config.n_layers}, found {count}")
    layers = tuple(
        Layer(**{name: make(f"{index}.{name}", tensor) for name, tensor in layer_tensors(config, index).items()})
        for index in range(count)
    )
    once = {name: make(name, tensor) for name, tensor in model_tensors(config, head=head).items()}
    return Params(layers=layers, **once)


def stack_layers(params: Params, runs: Sequence[LayerRun], join: Callable[[Sequence[T]], T]) -> Params:
    """Join the layers of each run, leaf by leaf, into one layer per place in its period."""
    layers: list[Layer] = []
    for run in runs:
        for place in range(run.period):
            members = [params.layers[layer] for layer in run.at(place)]
            layers.append(members[0] if run.steps == 1 else jax.tree.map(lambda *leaves: join(leaves), *members))
    return replace(params, layers=tuple(layers))


def param_shapes(
    config: ModelConfig,
    dtype: DTypeLike,
    runs: Sequence[LayerRun],
    place: Callable[[Axes, tuple[int, ...]], jax.sharding.Sharding],
    *,
    head: bool = False,
) -> Params:
    """Return the shapes, dtypes and shardings of the weights, stacked by run, without allocating memory."""
    tensors: Params = build(config, runs[-1].stop, lambda _, tensor: tensor, head=head)
    together = stack_layers(tensors, runs, lambda many: many[0].stacked(len(many)))

    def leaf(tensor: Tensor) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(dtype), sharding=place(tensor.axes, tensor.shape))

    shapes: Params = jax.tree.map(leaf, together)
    return shapes
