"""Every program of a described engine, compiled and written as the engine's own cache keeps them."""

import pickle
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from paxserve.engine.program_cache import ProgramCache
from paxserve.errors import ConfigError
from paxserve.planning.command import engine_for
from paxserve.planning.described_engine import DescribedEngine
from paxserve.planning.report import serve_command
from paxserve.platform import configure_jax


def compile_programs(given: Mapping[str, Any], *, topology: str, folder: str, is_essential: bool) -> int:
    """Write the programs into `folder`, read each file back, and print what they are for."""
    engine = engine_for(given, topology)
    configure_jax(engine.config.compile)
    written = write_programs(
        engine, Path(folder), is_essential=is_essential, report=lambda line: print(line, flush=True)
    )
    flags = dict(given) | {"num_gpu_blocks_override": engine.num_pages, "compilation_cache_dir": folder}
    print(f"{len(written)} programs in {folder}, written and read back; only a TPU can load them. They are those of:")
    print(serve_command(engine, flags))
    return 0


def programs_of(engine: DescribedEngine, *, is_essential: bool) -> dict[Hashable, Callable[[], Any]]:
    """What compiles each program, by the key under which the engine asks for it."""
    specs = engine.specs
    layouts = [*specs.essential_layouts()] if is_essential else specs.layouts
    jobs: dict[Hashable, Callable[[], Any]] = {layout: specs.step(layout).compile for layout in layouts}
    return jobs | {name: program.compile for name, program in specs.helpers().items()}


def write_programs(
    engine: DescribedEngine, folder: Path, *, is_essential: bool, report: Callable[[str], None]
) -> list[Path]:
    """The files written; ConfigError when a program does not compile, or is not in its file afterwards."""
    cache = ProgramCache(folder, *engine.specs.identity, devices=engine.specs.devices)
    paths = []
    for key, job in programs_of(engine, is_essential=is_essential).items():
        name, started = repr(key), time.perf_counter()
        try:
            program = job()
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            raise ConfigError(f"{name} does not compile for {engine.topology.name}: {error}") from error
        seconds, path = time.perf_counter() - started, cache.path(name)
        cache.save(name, program)
        if not is_written(path, program):
            raise ConfigError(f"{path} does not hold {name}, which was written to it: is the disk full?")
        report(f"{path.name}  {path.stat().st_size / 2**20:6.1f} MiB  {seconds:6.1f} s  {name}")
        paths.append(path)
    return paths


def is_written(path: Path, program: Any) -> bool:
    """Whether the file holds an executable for arguments and results of the program's form."""
    try:
        payload, *forms = pickle.loads(path.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError):
        return False
    _, *expected = serialize_executable.serialize(program)
    return len(payload) > 0 and forms == expected
