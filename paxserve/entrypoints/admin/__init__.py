"""The endpoints that change how the engine works, for whoever holds the admin key: one module each, with `router`."""
