from pathlib import Path

import paxserve
from paxserve.compatibility import Surface, page

DOCS = Path(paxserve.__file__).parent.parent / "docs"


def test_the_page_is_what_the_code_says():
    surface = Surface(DOCS / "vllm_surface.json")
    assert (DOCS / "compatibility.md").read_text() == page(surface), "Run `make readme`."


def test_every_name_of_vllm_has_a_status_and_a_reason():
    rows = list(Surface(DOCS / "vllm_surface.json").rows())
    assert len(rows) > 300
    for _, name, status in rows:
        assert status.word in ("supported", "differs", "accepted", "refused", "absent"), name
        assert status.reason or status.word == "supported", name
