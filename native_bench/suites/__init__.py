"""How long does each part of the engine take, and is what it gives right? pytest-benchmark suites.

As part of the default tests each runs once, small, for its assertions; `make bench-micro` measures at full
size.
"""
