"""What `ncclcomm run` does: starting ranks, and ending them together."""
