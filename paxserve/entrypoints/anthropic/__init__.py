"""The endpoints of Anthropic's API: one module each, exporting `router`."""
