"""How the bytes of a block are compressed."""
