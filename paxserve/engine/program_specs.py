"""What an engine's programs are made from: their functions and the shapes, types and places of their arguments.

Nothing here needs a weight or a device: the engine compiles these for the devices it has, `paxserve plan` and the tests
for devices that are only described.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.ragged_paged_attention import (
    PageContent,
    copy_pages,
    export_pages,
    import_pages,
    kv_head_axis,
    make_pool,
)
from paxserve.config import EngineConfig
from paxserve.engine.batch import Layout, MultiLayout
from paxserve.engine.buckets import is_essential, multi_layouts, plain_layouts, rich_layouts
from paxserve.engine.compiler_options import compile_lowered
from paxserve.engine.multi_step import make_multi_step
from paxserve.engine.page_budget import group_layers
from paxserve.engine.step import DeviceState, RichState, StepShape, make_step
from sharding.rules import pool_sharding, replicated, weight_sharding

NUM_UPDATES = 1024
"""Slot-table changes that one run of the `update` program applies."""

NUM_COPIES = 64
"""Pages that one run of the `copy` program copies."""

NUM_MOVES = 16
"""Pages that one run of the `export` or `import` program takes to or from host memory."""


class Program(NamedTuple):
    """A function, its abstract arguments, which of them it may overwrite, and where its results go."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    mesh: Mesh | None
    """The devices to compile for; None is jax's default device."""
    results: Any
    """A sharding, or a tree of them that is a beginning of the results' tree; None without a mesh."""

    def lower(self) -> Any:
        """The traced and lowered program."""
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            program = jax.jit(self.function, donate_argnums=self.donated, out_shardings=self.results)
            return program.lower(*self.arguments)

    def compile(self) -> Any:
        """The compiled program."""
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        return compile_lowered(self.lower(), device.device_kind)


class ProgramSpecs:
    """Every program of one engine. Arrays are described, never made: the model may be one of `nnx.eval_shape`."""

    def __init__(
        self, model: nnx.Module, config: EngineConfig, *, num_pages: int, max_model_len: int, mesh: Mesh | None = None
    ) -> None:
        """`config` is resolved: it has a dtype and a platform's defaults in place of every "auto" and None."""
        num_slots, budget = config.scheduler.limits
        self._graphdef, params = nnx.split(model)
        vocab_size = model.config.vocab_size  # type: ignore[attr-defined]
        spec = model.cache_spec  # type: ignore[attr-defined]
        page_size, top = config.cache.block_size, config.model.max_logprobs
        self.num_pages = num_pages
        self.num_layers = spec.num_layers
        self.mesh = mesh
        groups = group_layers(config, spec, max_model_len)
        self.shape = StepShape(
            num_slots=num_slots,
            max_pages=-(-max_model_len // page_size),
            groups=groups,
            vocab_size=vocab_size,
            num_top_logprobs=vocab_size if top == -1 else min(top, vocab_size),
            page_size=page_size,
            backend=config.compile.attention_backend,
            expert_backend=config.compile.expert_backend,
        )
        self.make_pool: Callable[[], Any] = partial(
            make_pool, self.shape.backend, num_layers=groups.size, num_pages=num_pages, page_size=page_size,
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, is_latent=spec.is_latent,
            dtype=jnp.dtype(config.kv_dtype),
        )  # fmt: skip
        self._has_offloading = config.cache.kv_offloading_size > 0
        self._head_dim = spec.head_dim
        self._limits = (budget, num_slots)
        sizes = (*self._limits, page_size, config.compile.compile_sizes, groups.num_groups)
        self.plain_layouts, self.rich_layouts = plain_layouts(*sizes), rich_layouts(*sizes)
        self.multi_layouts = multi_layouts(*sizes, num_steps=config.scheduler.num_scheduler_steps)
        self._replicated: Sharding | None = None if mesh is None else replicated(mesh)
        self.pool_sharding: Sharding | None = mesh and pool_sharding(mesh, kv_head_axis(self.shape.backend))
        if spec.is_latent:
            self.pool_sharding = self._replicated
        """Where each array of the pool goes."""
        heads_axis = weight_sharding(mesh, (*[None] * 4, "kv_heads")) if mesh else None
        self._content_sharding: Sharding | None = self._replicated if spec.is_latent else heads_axis
        """Where what is moved out of or into pages goes: each device has its own heads' part."""
        self._treedef = jax.tree.structure(params)
        variables = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
        self.weights: list[jax.ShapeDtypeStruct] = [self._described_weight(variable) for variable in variables]
        self.pool: Any = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.pool_sharding),
            jax.eval_shape(self.make_pool),
        )
        self.state = DeviceState(*self._int32(num_slots * self.shape.width, num_slots))
        by_vocab = partial(self._described, (num_slots, vocab_size))
        self.rich = RichState(by_vocab(jnp.float32), by_vocab(jnp.int32), by_vocab(jnp.bool_))  # type: ignore[arg-type]
        self._model_identity = (type(model), model.config, max_model_len, config.compile.layer_execution)  # type: ignore[attr-defined]

    @property
    def identity(self) -> tuple[object, ...]:
        """All that the programs depend on besides their names and the devices; what `repr` makes of it is stable."""
        arrays = [(leaf.shape, str(leaf.dtype)) for leaf in (*self.weights, *jax.tree.leaves(self.pool))]
        mesh = None if self.mesh is None or self.mesh.size == 1 else dict(self.mesh.shape)
        return (*self._model_identity, self.shape, mesh, arrays)

    @property
    def devices(self) -> list[Any] | None:
        """The mesh's devices; None without a mesh."""
        return None if self.mesh is None else list(self.mesh.devices.flat)

    def essential_layouts(self) -> Iterator[Layout]:
        """The steps that a start waits for: with them any step that needs no rich program can be run."""
        return (layout for layout in self.layouts if is_essential(layout, *self._limits))

    @property
    def layouts(self) -> list[Layout]:
        """Every size of every kind of step."""
        return [*self.plain_layouts, *self.rich_layouts, *self.multi_layouts]

    def step(self, layout: Layout) -> Program:
        """The step of one bucket: `(weights, pool, state, rich, packed) -> (pool, state, rich, out)`."""
        parts = self._graphdef, self._treedef
        if isinstance(layout, MultiLayout):
            function = make_multi_step(*parts, layout, self.shape, self.mesh)
        else:
            function = make_step(*parts, layout, self.shape, self.mesh)
        rich = self.rich if layout.is_rich else None
        (packed,) = self._int32(layout.size)
        arguments = (self.weights, self.pool, self.state, rich, packed)
        results = (self.pool_sharding, *[self._replicated] * 3)
        return Program(function, arguments, (1, 2, 3), self.mesh, results if self.mesh else None)

    def helpers(self) -> dict[str, Program]:
        """The small programs that run ahead of a step, by name; each overwrites its first argument."""
        vocab_size = self.shape.vocab_size
        slot, row = self._described((), jnp.int32), partial(self._described, (vocab_size,))
        programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "update": (_update_table, (self.state, *self._int32(NUM_UPDATES, NUM_UPDATES))),
            "copy": (
                partial(copy_pages, backend=self.shape.backend),
                (self.pool, *self._int32(NUM_COPIES, NUM_COPIES)),
            ),
            "bias": (_set_bias, (self.rich, slot, row(jnp.float32))),
            "counts": (_set_counts, (self.rich, slot, row(jnp.int32), row(jnp.bool_))),
        }
        results = {name: self.pool_sharding if name == "copy" else self._replicated for name in programs}
        helpers = {name: Program(*parts, (0,), self.mesh, results[name]) for name, parts in programs.items()}
        return helpers | self._moves() if self._has_offloading else helpers

    @property
    def moved_pages(self) -> PageContent:
        """What one run of `export` brings out of the pool."""
        (pages,) = self._int32(NUM_MOVES)
        return jax.eval_shape(self._export, self.pool, pages)

    def _moves(self) -> dict[str, Program]:
        """The programs that move pages from and to host memory; only the second overwrites the pool."""
        (pages,) = self._int32(NUM_MOVES)
        content = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._content_sharding), self.moved_pages
        )
        return {
            "export": Program(self._export, (self.pool, pages), (), self.mesh, self._content_sharding),
            "import": Program(self._import, (self.pool, pages, content), (0,), self.mesh, self.pool_sharding),
        }

    def _export(self, pool: Any, pages: Int32[Array, " M"]) -> PageContent:
        function = partial(export_pages, backend=self.shape.backend, head_dim=self._head_dim)
        return self._on_each_shard(function, (self.pool_sharding, self._replicated), self._content_sharding)(
            pool, pages
        )

    def _import(self, pool: Any, pages: Int32[Array, " M"], content: PageContent) -> Any:
        function = partial(import_pages, backend=self.shape.backend)
        arguments = (self.pool_sharding, self._replicated, self._content_sharding)
        return self._on_each_shard(function, arguments, self.pool_sharding)(pool, pages, content)

    def _on_each_shard(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], results: Any
    ) -> Callable[..., Any]:
        """The function, run by each device on its own heads: what a device has of a pool is a pool of its own."""
        if self.mesh is None:
            return function
        specs = tuple(sharding.spec for sharding in arguments)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=results.spec, check_vma=False)

    def _described(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """An argument that every device of the mesh has whole."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)

    def _described_weight(self, variable: nnx.Variable) -> jax.ShapeDtypeStruct:
        value = variable.get_value()
        sharding = self.mesh and weight_sharding(self.mesh, variable.get_metadata("out_sharding"))
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def _int32(self, *lengths: int) -> list[Any]:
        return [self._described((length,), jnp.int32) for length in lengths]


def _update_table(state: DeviceState, indices: Int32[Array, " U"], values: Int32[Array, " U"]) -> DeviceState:
    return state._replace(table=state.table.at[indices].set(values, mode="drop"))


def _set_bias(rich: RichState, slot: Int32[Array, ""], bias: Float32[Array, " V"]) -> RichState:
    return rich._replace(bias=rich.bias.at[slot].set(bias))


def _set_counts(
    rich: RichState, slot: Int32[Array, ""], counts: Int32[Array, " V"], in_prompt: Bool[Array, " V"]
) -> RichState:
    return rich._replace(
        output_counts=rich.output_counts.at[slot].set(counts), in_prompt=rich.in_prompt.at[slot].set(in_prompt)
    )
