"""What docs/security.md promises and no other test shows, and that each of its rows names tests that there are."""

import re
import urllib.request
from pathlib import Path

import paxserve
from paxserve.chat_content import detect_content_format
from paxserve.loaders import chat_template
from tests.paxserve.serving import Serving, run

ROOT = Path(paxserve.__file__).parent.parent
ROWS = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")][2:]


def test_every_row_of_the_table_names_tests_that_there_are():
    known = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        known |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(ROWS) > 20
    for row in ROWS:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, row
        assert not set(named) - known, row


def test_nothing_is_unpickled():
    # Compiled programs are: files of the user's own, in a folder that belongs to nobody else; `paxserve compile` reads
    # back what it has just written.
    pattern = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|cloudpickle)\b|recv_pyobj|send_pyobj|allow_pickle=True", re.M
    )
    found = {path.name for path in (ROOT / "paxserve").rglob("*.py") if pattern.search(path.read_text())}
    assert found == {"program_cache.py", "executables.py"}


def test_ids_that_could_do_harm_are_replaced():
    odd = ["a/b", "tcp://10.0.0.1:5", "x" * 200, "a\tb", "a@b", "\\"]

    async def test(served: Serving):
        answers = [
            await served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": value})
            for value in odd
        ]
        kept = await served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "trace-17"})
        return [answer.json()["id"] for answer in answers], kept.json()["id"]

    ids, kept = run(test)
    assert kept == "cmpl-trace-17"
    assert all(re.fullmatch(r"cmpl-[0-9a-f]{32}", answer_id) for answer_id in ids)


def test_metrics_have_no_labels_from_clients():
    async def test(served: Serving):
        for word in ("madeup1", "madeup2"):
            await served.complete(model=word)
            await served.complete("x", request_id=word, cache_salt=word, user=word, max_tokens=1)
            await served.http.request(word.upper(), f"/{word}", headers={"User-Agent": word})
        return (await served.http.get("/metrics")).text

    text = run(test)
    assert "madeup" not in text.lower()


def test_caches_by_template_are_bounded():
    for cached in (chat_template._compile, detect_content_format):
        assert cached.cache_parameters()["maxsize"] == 32


def test_no_client_makes_the_server_fetch_anything(monkeypatch):
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: fetched.append(args))
    url = "http://169.254.169.254/latest"

    async def test(served: Serving):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return [
            await served.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}]),
            await served.complete(model=url), await served.complete(prompt_embeds=url),
            await served.complete(lora_path=url),
        ]  # fmt: skip

    assert {response.status_code for response in run(test)} == {400, 404}
    assert not fetched
