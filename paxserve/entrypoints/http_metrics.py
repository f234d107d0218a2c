"""What HTTP requests are counted as, under the names that instrumented FastAPI servers have."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
"""Methods that are labels; any other that a client thinks of is OTHER."""

SILENT = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Routes that are not counted: machines ask them all day."""

FINE_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60,
)  # fmt: skip


class HttpMetrics:
    """Counters and durations by route; `handler` is the route as it was declared, never what a client sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("handler", "method")
        self._requests = Counter(
            "http_requests", "Requests by route, method and status class.", (*labels, "status"), registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds", "Time to the end of the answer.", labels, buckets=(0.1, 0.5, 1),
            registry=registry,
        )  # fmt: skip
        self._fine_seconds = Histogram(
            "http_request_duration_highr_seconds", "The same for all routes together.", buckets=FINE_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._request_bytes = Summary("http_request_size_bytes", "Bytes received.", labels[:1], registry=registry)
        self._answer_bytes = Summary("http_response_size_bytes", "Bytes sent.", labels[:1], registry=registry)

    def record(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, answer_bytes: int
    ) -> None:
        """Count one request; `handler` is "none" when no route has answered."""
        if handler in SILENT:
            return
        method = method if method in METHODS else "OTHER"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)
        self._fine_seconds.observe(seconds)
        self._request_bytes.labels(handler).observe(request_bytes)
        self._answer_bytes.labels(handler).observe(answer_bytes)
