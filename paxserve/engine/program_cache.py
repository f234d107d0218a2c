"""Compiled programs on disk, so that a later start neither traces nor lowers nor compiles.

jax's own compilation cache is keyed by the lowered program, which takes most of a warm start to make. Here
the key is what the program is made from: the sources of these packages, the versions of jax and the
compiler, its flags, the device, and the shapes. A file that cannot be used is compiled again. jax's own cache
must be off meanwhile (see `platform.configure_jax`).
"""

import hashlib
import importlib.util
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

SOURCE_PACKAGES = ("paxserve", "models", "pallas_kernels", "sharding")


class ProgramCache:
    """Programs of one engine, by name. The folder is the user's own: files in it are trusted."""

    def __init__(self, folder: Path | None, *identity: object, devices: Sequence[Any] | None = None) -> None:
        """`identity` is all that the programs depend on besides their names, this installation and their `devices`.

        By default that is jax's first device; for described ones programs can only be written.
        """
        self._folder = folder
        self._devices = list(devices or jax.devices()[:1])
        places = repr([device.id for device in self._devices])
        self._identity = "\n".join([_environment(self._devices), places, *map(repr, identity)])
        self.num_loaded = 0

    def path(self, name: str) -> Path:
        """The file of a program."""
        assert self._folder is not None, "this cache keeps nothing"
        digest = hashlib.sha256(f"{self._identity}\n{name}".encode()).hexdigest()
        return self._folder / f"{digest[:40]}.xla"

    def get(self, name: str, compile_program: Callable[[], Any]) -> Any:
        """The program of that name, loaded if a former start has kept it, else compiled and kept."""
        if self._folder is None:
            return compile_program()
        path = self.path(name)
        program = self._load(path, name)
        if program is None:
            program = compile_program()
            self.save(name, program)
        else:
            self.num_loaded += 1
        return program

    def _load(self, path: Path, name: str) -> Any:
        try:
            kept = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(*kept, execution_devices=self._devices)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with the file, compiling mends it
            logger.warning("The kept program %s cannot be used and is compiled again: %s", name, error)
            return None

    def save(self, name: str, program: Any) -> None:
        """Keep a program: written beside its file and renamed, so that no reader ever sees half of it."""
        path = self.path(name)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = pickle.dumps(serialize_executable.serialize(program))
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(data)
            os.replace(file.name, path)
        except OSError as error:
            logger.warning("A compiled program could not be kept in %s: %s", path.parent, error)


def _environment(devices: Sequence[Any]) -> str:
    """Everything about this installation and the devices that a compiled program depends on."""
    device = devices[0]
    parts = [
        jax.__version__,
        jaxlib.version.__version__,
        device.platform,
        device.device_kind,
        str(getattr(device.client, "platform_version", "")),
        str(len(devices)),
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        _cpu_features() if device.platform == "cpu" else "",
        _source_digest(),
    ]
    return "\n".join(parts)


def _cpu_features() -> str:
    """The instructions this processor has: a program compiled for more of them would crash here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _source_digest() -> str:
    digest = hashlib.sha256()
    for package in SOURCE_PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
