"""From staged bytes to a commit: what one rank's writer process does."""
