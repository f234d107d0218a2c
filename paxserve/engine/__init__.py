"""The engine: requests in, tokens out, one fixed-shape device step at a time.

Host side, without jax: `request`, `scheduler`, `kv_cache`, `prefix_cache`. Device side: `batch` packs a
step, `program_specs` describes it from shapes alone, `model_runner` compiles and
launches it, `sampler` ends it. `engine_core` ties them together;
`core_process`, `core_client`, `front_routes` and `async_engine` put a process boundary around it; `input_processor`,
`detokenizer` and `output_processor` turn text into tokens and back.
"""
