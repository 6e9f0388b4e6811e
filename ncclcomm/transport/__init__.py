"""Transports: collectives of one flat group."""
