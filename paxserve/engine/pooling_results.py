"""What the core answers a pooling request, as callers read it."""

import time

import numpy as np
from jaxtyping import Float32

from paxserve.errors import RequestError
from paxserve.messages import EngineOutput, EngineRequest
from paxserve.outputs import RequestMetrics
from paxserve.pooling_outputs import PoolingOutput, PoolingRequestOutput


def read_pooled(request: EngineRequest, output: EngineOutput) -> PoolingRequestOutput[PoolingOutput]:
    """The request's numbers. Raises `RequestError` if it was ended without."""
    if output.pooled is None:
        raise RequestError("The request was aborted.")
    data = np.frombuffer(output.pooled, np.float32)
    if request.pooling is not None and request.pooling.task == "token_embed":
        data = data.reshape(len(request.prompt_token_ids), -1)
    metrics = RequestMetrics(
        arrival_time=request.arrival_time,
        first_scheduled_time=output.first_scheduled_time,
        finished_time=time.time(),
    )
    return PoolingRequestOutput(
        request_id=request.request_id,
        outputs=PoolingOutput(data),
        prompt_token_ids=request.prompt_token_ids,
        metrics=metrics,
    )


def cosine_score(first: Float32[np.ndarray, " D"], second: Float32[np.ndarray, " D"]) -> float:
    """The cosine of the angle between two vectors."""
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return float(np.dot(first, second) / max(float(lengths), 1e-8))
