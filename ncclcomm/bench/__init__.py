"""What `ncclcomm bench` does: times every collective beside its peers, and checks the answers."""
