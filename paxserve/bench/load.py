"""Many requests at a given rate and concurrency: the load that a server is measured under."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace

import httpx
import numpy as np

from paxserve.bench.client import Record, Target, send
from paxserve.bench.datasets import BenchRequest
from paxserve.client import client_options
from paxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests arrive."""

    request_rate: float = float("inf")
    """Mean arrivals a second; infinite sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is a Poisson process, less is burstier."""
    max_concurrency: int | None = None
    """Most requests in flight; the others wait at the client, unmeasured."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_rate <= 0 or self.burstiness <= 0:
            raise ConfigError("The request rate and the burstiness must be greater than 0.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"The concurrency must be at least 1, got {self.max_concurrency}.")

    def arrivals(self, requests: list[BenchRequest]) -> list[float]:
        """When each request is sent, in seconds after the start; a request's own time wins."""
        times = np.zeros(len(requests))
        if np.isfinite(self.request_rate):
            scale = 1 / (self.request_rate * self.burstiness)
            times = np.cumsum(np.random.default_rng(self.seed).gamma(self.burstiness, scale, len(requests)))
        return [float(at) if own.arrival is None else own.arrival for own, at in zip(requests, times, strict=True)]


async def check_server(target: Target, request: BenchRequest, api_key: str | None) -> None:
    """Send a two-token version of a request, so that a wrong address or model is reported before the measurement.

    Raises `ConfigError` with the server's own words.
    """
    async with httpx.AsyncClient(**client_options(target.root, api_key)) as session:
        record = await send(session, target, replace(request, max_tokens=min(2, request.max_tokens)))
    if not record.is_success:
        raise ConfigError(f"{target.root}{target.endpoint} does not answer as expected: {record.error}")


async def run_load(
    target: Target, requests: list[BenchRequest], load: Load, api_key: str | None = None
) -> tuple[list[Record], float]:
    """The record of every request, in their order, and the seconds from the first one sent to the last one ended."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    free = contextlib.nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
    async with httpx.AsyncClient(limits=limits, **client_options(target.root, api_key)) as session:
        begin = time.perf_counter()

        async def send_at(request: BenchRequest, at: float) -> Record:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            async with free:
                return await send(session, target, request)

        tasks = [send_at(request, at) for request, at in zip(requests, load.arrivals(requests), strict=True)]
        records = await asyncio.gather(*tasks)
        return records, time.perf_counter() - begin


def served_model(root: str, api_key: str | None) -> str:
    """The first name in the server's list of models. Raises `ConfigError` if there is no answer."""
    try:
        response = httpx.get(f"{root}/v1/models", **client_options(root, api_key, timeout=30.0))
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"{root}/v1/models gives no model name ({error}); name it with --model.") from None
