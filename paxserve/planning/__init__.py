"""What an engine would need and do on hardware that is not here: memory, programs, the compiler's own estimates.

`compiled_text` reads what the compiler wrote, `cycles` adds up its estimates.
"""
