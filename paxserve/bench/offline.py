"""The engine measured in this process, without a server: throughput of many requests, latency of one batch."""

import time
from typing import Any

import numpy as np

from paxserve.bench.datasets import BenchRequest
from paxserve.bench.report import statistics
from paxserve.llm import LLM
from paxserve.sampling_params import SamplingParams


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def measure_throughput(llm: LLM, requests: list[BenchRequest]) -> dict[str, Any]:
    """Requests and tokens a second when all requests are given at once; every output has its full length."""
    prompts = [_prompt(request.prompt) for request in requests]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [_params(request.max_tokens) for request in requests], use_tqdm=False)
    elapsed = time.perf_counter() - begin
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }


def measure_latency(
    llm: LLM, batch_size: int, input_len: int, output_len: int, vocab_size: int, num_iters: int, num_warmup: int
) -> dict[str, Any]:
    """How long one batch of random prompts takes from start to end, over several runs with different prompts."""
    rng = np.random.default_rng(0)
    seconds = []
    for run in range(num_warmup + num_iters):
        prompts = [_prompt(rng.integers(3, vocab_size, input_len).tolist()) for _ in range(batch_size)]
        begin = time.perf_counter()
        llm.generate(prompts, _params(output_len), use_tqdm=False)
        if run >= num_warmup:
            seconds.append(time.perf_counter() - begin)
    mean = float(np.mean(seconds))
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "latencies": seconds,
        "output_tokens_per_second": batch_size * output_len / mean,
    } | statistics("latency", seconds)


def _prompt(prompt: str | list[int]) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
