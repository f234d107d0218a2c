"""The table of what was checked says what the tests in this folder run, no more and no less."""

import json
from collections import defaultdict

from models import architectures
from models.verified import read_verified
from tests.models.test_configs import CONFIGS, ENCODERS, PUBLISHED
from tests.models.test_goldens import GOLDENS
from tests.models.test_pooling_goldens import CASES
from tests.models.test_pooling_goldens import GOLDENS as POOLING_FOLDER

GOLDENS_FOLDER = POOLING_FOLDER.parent
REAL = {  # the tests: engine/test_real_weights.py, test_minilm.py
    "smollm2-135m-instruct": "llama",
    "gemma-3-270m": "gemma3_text",
    "all-minilm-l6-v2": "bert",
}


def family(path):
    return json.loads(path.read_text())["model_type"].replace("-", "_")


def expected():
    table = defaultdict(lambda: defaultdict(list))
    for name in (*GOLDENS, "phi3_longrope"):
        table[family(GOLDENS_FOLDER / name / "config.json")]["goldens"].append(name)
    for name in CASES:
        table[family(POOLING_FOLDER / name / "config.json")]["pooling"].append(name)
    for name in (*PUBLISHED, *ENCODERS):
        table[family(CONFIGS / f"{name}.json")]["sizes"].append(name)
    for name, model_type in REAL.items():
        assert (GOLDENS_FOLDER / "real" / f"{name}.json").is_file()
        table[model_type]["real"].append(name)
    return {name: {kind: sorted(names) for kind, names in entry.items()} for name, entry in table.items()}


def toml(table):
    lines = []
    for name, entry in sorted(table.items()):
        lines.append(f"\n[{name}]")
        for kind in ("goldens", "pooling", "sizes", "real"):
            if kind in entry:
                lines.append(f"{kind} = {json.dumps(entry[kind])}")
    return "\n".join(lines) + "\n"


def test_the_table_says_what_is_tested():
    assert {name: entry.as_dict() for name, entry in read_verified().items()} == expected(), (
        f"models/verified.toml should have:\n{toml(expected())}"
    )


def test_it_names_families_only():
    assert read_verified().keys() <= set(architectures())
