"""The demonstration: two ranks lose one, recover, and end with the bits of a run that was not disturbed."""
