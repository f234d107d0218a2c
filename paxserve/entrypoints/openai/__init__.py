"""The endpoints of OpenAI's API and their companions: one module each, exporting `router`."""
