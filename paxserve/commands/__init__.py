"""The subcommands of `paxserve`, one module each; `bench_serve` is called `paxserve bench serve`.

A module exports `DESCRIPTION` and `USAGE` for its help, `add_arguments(parser)`, and `run(arguments)`, which
returns the exit status and imports what is slow to load.
"""
