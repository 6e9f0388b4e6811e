"""Who is timed beside ncclcomm; each file is imported only where its peer is asked for."""
