"""The HTTP server: `serve` runs it, `app` puts it together, `openai/` has one module for each endpoint.

`protocol/` holds the bodies that clients send and get, `errors` the one place where exceptions become answers.
"""
