"""Format version 1: what the bytes of a checkpoint mean, with no I/O and no torch."""
