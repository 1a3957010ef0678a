"""The two compiled programs of generation, and where what they work on lies: one reads prompts, one makes tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spile.model.attention import choose
from spile.model.encoding import as_stored, finite_rows
from spile.model.experts import MIXTURES
from spile.model.generation import Choices, Chunk, Sampling, Slots, empty_slots, read_prompts, take_steps
from spile.model.params import Params
from spile.runtime.mesh import plan_mesh
from spile.runtime.slots import SlotPlan
from spile.spec.architecture import ModelConfig
from spile.spec.run import Capture
from spile.spec.taps import Tap

__all__ = ["GenerationPrograms"]


class GenerationPrograms:
    """Compiled beside each other while the first prompts are tokenized."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        taps: tuple[Tap, ...],
        *,
        mesh: Mesh,
        plan: SlotPlan,
        sampling: Sampling,
        capture: Capture,
        dtype: str,
        store_dtype: str,
    ) -> None:
        self._config, self._plan, self._sampling = config, plan, sampling
        self._dtype, self._store_dtype = dtype, store_dtype
        self._prompt_taps = taps if capture in ("prompt", "both") else ()
        self._answer_taps = taps if capture in ("answer", "both") else ()
        platform = mesh.devices.flat[0].platform
        mixture = plan_mesh(config, (mesh.shape["data"], mesh.shape["model"])).mixture(platform, mesh, config)
        self._mixture = MIXTURES[mixture] if isinstance(mixture, str) else mixture
        # A kernel is not partitioned by the compiler, so several devices read with plain XLA.
        self._attention = choose(config, platform, dtype) if mesh.size == 1 else "xla"
        self._groups = int(mesh.shape["data"])
        self.by_group = NamedSharding(mesh, PartitionSpec("data"))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._away = self.by_group if platform == "cpu" else self.by_group.with_memory_kind("pinned_host")
        heads = "model" if config.n_kv_heads % mesh.shape["model"] == 0 else None
        cache = NamedSharding(mesh, PartitionSpec("data", heads))
        shapes = jax.eval_shape(self._make_empty)
        self._places = jax.tree.map(lambda x: cache if x.ndim == 5 else self.by_group, shapes)
        given = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, self._places
        )
        self._compilers = ThreadPoolExecutor(2, "spile-compile")
        self.reader: Future[Any] = self._compilers.submit(self._reader, params, given)
        self.stepper: Future[Any] = self._compilers.submit(self._stepper, params, given)

    def close(self) -> None:
        """Compile nothing more."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def empty(self) -> Slots:
        """The cache, made where it will lie."""
        placed: Slots = jax.block_until_ready(jax.jit(self._make_empty, out_shardings=self._places)())
        return placed

    def _make_empty(self) -> Slots:
        return empty_slots(self._config, self._groups, self._plan.slots, self._plan.capacity, self._dtype)

    def _reader(self, params: Params, slots: Slots) -> Any:
        def program(params: Params, slots: Slots, chunk: Chunk) -> Any:
            slots, chosen, kept = read_prompts(
                params, slots, chunk, config=self._config, taps=self._prompt_taps, sampling=self._sampling,
                mixture=self._mixture, attention=self._attention, keep=self._cast,
            )  # fmt: skip
            return slots, chosen, *self._leaving(kept)

        shape = (self._groups, self._plan.rows)
        one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.by_group)
        tokens = jax.ShapeDtypeStruct((*shape, self._plan.chunk), jnp.int32, sharding=self.by_group)
        flags = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=self.by_group)
        return self._compiled(program, len(self._prompt_taps), params, slots, Chunk(tokens, one, one, one, flags, one))

    def _stepper(self, params: Params, slots: Slots) -> Any:
        def program(params: Params, slots: Slots) -> Any:
            slots, chosen, kept = take_steps(
                params, slots, stride=self._plan.stride, config=self._config, taps=self._answer_taps,
                sampling=self._sampling, mixture=self._mixture, keep=self._cast,
            )  # fmt: skip
            # One slot's rows side by side: [groups × slots, stride, …].
            return slots, chosen, *self._leaving(tuple(jnp.swapaxes(x[:, :, 0], 0, 1) for x in kept))

        return self._compiled(program, len(self._answer_taps), params, slots)

    def _cast(self, tap: Tap, x: jax.Array) -> jax.Array:
        return as_stored(x, tap.stored_as(self._store_dtype, x.shape[-1]))

    def _leaving(self, kept: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        finite = jnp.stack([finite_rows(x).all() for x in kept]) if kept else jnp.ones((0,), bool)
        return tuple(jax.device_put(x, self._away) for x in kept), finite

    def _compiled(self, program: Callable[..., Any], taps: int, *given: Any) -> Any:
        chosen = Choices(self._everywhere, self._everywhere)
        out = (self._places, chosen, (self._away,) * taps, self._everywhere)
        return jax.jit(program, donate_argnums=1, out_shardings=out).lower(*given).compile()
