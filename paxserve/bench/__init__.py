"""Measuring: data sets, a load generator for any OpenAI-compatible server, offline runs, reports and plots.

`datasets` makes requests, `client` sends one and times it, `load` sends many, `report` sums up, `plot` draws;
`offline` runs the engine in this process. The commands are in `paxserve.commands.bench_*`. No jax but in `offline`.
"""
