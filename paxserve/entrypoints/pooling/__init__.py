"""The pooling endpoints (vectors, classes, scores), one module each: a module's `router` is its registration."""
