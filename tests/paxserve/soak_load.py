"""More requests than a server can bear, of every kind, and a tally of what became of each."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

VOCAB_SIZE = 301
PATIENCE_SECONDS = 60
"""No request waits longer than this: the server's own deadline is far below."""
SPICES = {
    "top_p": 0.9, "top_k": 5, "presence_penalty": 0.5, "seed": 5, "stop": ["a", "ee"], "logprobs": 3,
    "ignore_eos": True, "min_tokens": 1, "logit_bias": {"5": 3}, "cache_salt": "x", "truncate_prompt_tokens": 40,
}  # fmt: skip


@dataclass
class Tally:
    """What became of the requests, as the client saw it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests, by sent, answered, refused, left (by the client) and what was wrong with them."""
    choices: Counter[str] = field(default_factory=Counter)
    """Choices of answered requests, by finish_reason."""
    choices_left: int = 0
    """Choices of requests that the client did not wait for."""
    tokens: int = 0
    """Output tokens of answered requests, as their usage says."""
    features: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Load:
    """Sends random requests to `http`; the greedy ones among them have known answers."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self.http = http
        self.tally = Tally()
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(length) for length in (20, 33, 48, 64, 100, 130)]
        self._known = [(self._plain_body(number), "") for number in range(12)]
        self._tasks: set[asyncio.Task[None]] = set()

    async def learn_answers(self) -> None:
        """Ask the greedy requests one by one, while nothing else runs."""
        for place, (body, _) in enumerate(self._known):
            # The first of a kind may be ended by its deadline while a program for it is still being compiled.
            for _ in range(20):
                response = await self.http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                answer = response.json()
                self.tally.outcomes.update(sent=1, answered=1)
                self._check(body, answer, None)
                if all(choice["finish_reason"] != "abort" for choice in answer["choices"]):
                    self._known[place] = body, self._texts(answer)
                    break
            else:
                raise AssertionError(f"always ended by its deadline: {body}")

    async def run(self, seconds: float, rate: float) -> None:
        """Requests that come at random, `rate` a second, whatever becomes of those before; fewer from a slow client."""
        loop = asyncio.get_running_loop()
        end, due = loop.time() + seconds, loop.time()
        while due < end and loop.time() < end:
            await asyncio.sleep(max(0, due - loop.time()))
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due += self._random.expovariate(rate)

    async def wait(self) -> None:
        """Until nothing is on its way any more."""
        await asyncio.gather(*self._tasks)

    async def measure_capacity(self, seconds: float) -> float:
        """Requests a second when as many as the server runs at once are always there."""
        answered = self.tally.outcomes["answered"]
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds

        async def turns() -> None:
            while loop.time() < end:
                await self._one()

        await asyncio.gather(*(turns() for _ in range(16)))
        return (self.tally.outcomes["answered"] - answered) / seconds

    async def _one(self) -> None:
        tally, source = self.tally, self._random
        known = source.choice(self._known) if source.random() < 0.25 else None
        path, body = ("/v1/completions", known[0]) if known else self._random_request()
        leaves = source.random() < 0.1
        tally.outcomes["sent"] += 1
        try:
            async with asyncio.timeout(source.random() if leaves else PATIENCE_SECONDS):
                answer = await (self._stream if body.get("stream") else self._ask)(path, body)
        except TimeoutError:
            tally.outcomes["left" if leaves else "stuck"] += 1
            tally.choices_left += body.get("n", 1)
            if not leaves:
                tally.faults.append(f"no answer in {PATIENCE_SECONDS} s: {body}")
            return
        except httpx.HTTPError as error:
            tally.outcomes["broken"] += 1
            tally.faults.append(f"{error!r}: {body}")
            return
        if answer is None:
            tally.outcomes["refused"] += 1
            return
        tally.outcomes["answered"] += 1
        self._check(body, answer, known[1] if known else None)

    def _check(self, body: dict[str, Any], answer: dict[str, Any], expected: str | None) -> None:
        tally = self.tally
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        tally.choices.update(reasons)
        tally.tokens += answer["usage"]["completion_tokens"]
        if len(reasons) != body.get("n", 1) or not set(reasons) <= {"stop", "length", "abort"}:
            tally.faults.append(f"ends {reasons}: {body}")
        if expected is not None and "abort" not in reasons and self._texts(answer) != expected:
            tally.faults.append(f"another answer than when idle: {expected} became {self._texts(answer)}: {body}")

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        response = await self.http.post(path, json=body)
        if response.status_code == 429:
            return None
        response.raise_for_status()
        return response.json()

    async def _stream(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The whole answer, put together from its chunks."""
        choices: dict[int, dict[str, Any]] = {}
        usage: dict[str, int] = {"completion_tokens": 0}
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code == 429:
                return None
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise httpx.HTTPError(f"an error in the stream: {chunk}")
                usage = chunk.get("usage") or usage
                for delta in chunk["choices"]:
                    choice = choices.setdefault(delta["index"], {"text": "", "finish_reason": None})
                    choice["text"] += delta.get("text") or (delta.get("delta") or {}).get("content") or ""
                    choice["finish_reason"] = delta["finish_reason"] or choice["finish_reason"]
        return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}

    def _texts(self, answer: dict[str, Any]) -> str:
        return json.dumps([choice["text"] for choice in answer["choices"]])

    def _tokens(self, length: int) -> list[int]:
        return [self._random.randrange(2, VOCAB_SIZE) for _ in range(length)]

    def _plain_body(self, number: int) -> dict[str, Any]:
        prompt = self._prefixes[number % len(self._prefixes)] + self._tokens(1 + 7 * (number % 4))
        body = {
            "prompt": prompt,
            "max_tokens": 8 + 5 * (number % 7),
            "temperature": 0,
            "n": 1,
            "priority": number % 3 - 1,
        }
        if number % 4 == 3:
            body |= {"use_beam_search": True, "n": 2 + number % 3}
        return body

    def _random_request(self) -> tuple[str, dict[str, Any]]:
        source = self._random
        body: dict[str, Any] = {"max_tokens": source.randint(1, 80), "priority": source.choice([0, 0, 0, -1, 1])}
        kind = source.choice(["greedy", "sampled", "sampled", "many", "beams"])
        is_chat = kind != "beams" and source.random() < 0.2
        if is_chat:
            body["messages"] = [{"role": "user", "content": "the dog " * source.randint(1, 10)}]
        else:
            prefix = source.choice([[], *self._prefixes])
            body["prompt"] = prefix[: source.randint(0, len(prefix))] + self._tokens(source.randint(1, 60))
        if kind == "beams":
            body |= {"use_beam_search": True, "n": source.randint(1, 4), "early_stopping": source.choice([True, False])}
        else:
            body["temperature"] = 0 if kind == "greedy" else source.choice([0.7, 1.5])
            body["n"] = source.randint(2, 3) if kind == "many" else 1
            body |= {name: value for name, value in SPICES.items() if source.random() < 0.1}
            if is_chat and "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": 2}
            body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
            if source.random() < 0.5:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
        self.tally.features.update({kind: 1, "stream" if body.get("stream") else "whole": 1})
        return ("/v1/chat/completions" if is_chat else "/v1/completions"), body
