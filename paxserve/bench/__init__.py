"""Measuring: data sets, a load generator for any OpenAI-compatible server, offline runs, reports and plots.

`datasets` makes requests, `client` sends one and times it, `load` sends many, `report` sums up, `plot` draws;
`offline` runs the engine in this process, `startup` starts servers, `process_memory` weighs them. The commands are
`paxserve.commands.bench_*`. Only `offline` imports jax.
"""
