import subprocess
import sys
from pathlib import Path

import pytest

import paxserve

ROOT = Path(__file__).parents[2]


def run(code, *, cwd=ROOT):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, paxserve; paxserve.SamplingParams; paxserve.RequestOutput; paxserve.Logprob; "
        "print([name for name in ('jax', 'numpy', 'tokenizers', 'models', 'flax') if name in sys.modules])"
    )
    assert run(code).stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in paxserve.__all__:
        assert getattr(paxserve, name) is not None
        assert name in dir(paxserve)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = paxserve.Nothing


def test_a_foreign_models_package_is_named(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    done = run(f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import paxserve")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(tmp_path) in last
    assert str(ROOT) in last
    assert "'models'" in last
