"""Has most generated bodies name a model that is served and small numbers of tokens: else nearly all end at a 404."""

import schemathesis


@schemathesis.hook
def map_body(context, body):
    """The body with what a server needs to go on."""
    if isinstance(body, dict) and len(body) % 4:
        body = {**body, "model": "fake"}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] > 0:
                body[name] = body[name] % 40 + 1
    return body
