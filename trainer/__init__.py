"""The reference trainer: a small language model that checkpoints with ckptengine and survives faults.

It shows how the engine is used in a real sharded job, and is what the demo and the fault tests run. It is
not part of the installed package.
"""
