"""What `ncclcomm doctor` and `ncclcomm info` do: look at every rank, and say what is wrong and what to type."""
