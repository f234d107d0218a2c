"""Where a server's front stands: alone in front of the core, or one of several processes that share a port.

`launcher` starts and watches several (`front_handle`, `front_channel`), `front_process` is one of them, `only_front`
the one without others; to the rest of the server both are a `station`. `desk` does what belongs to one front,
`all_fronts` says how it is asked, `peers` and `peer_wire` take it to other processes, `metrics_pool` adds up what they
count.
"""
