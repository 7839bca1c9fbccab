"""How ranks agree without collectives: a key-value transport, and a group of ranks on top of it."""
