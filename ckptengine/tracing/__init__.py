"""What happened when in a save or restore: recorded by each process as Chrome trace events, then merged."""
