"""The blocks that model families share: what two families have in common is written here once."""
