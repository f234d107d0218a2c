"""The bodies of requests (pydantic models, checked field by field) and of answers (msgspec structs)."""
