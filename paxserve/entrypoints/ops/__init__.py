"""The endpoints for those who run the server: one module each, exporting `router`."""
