"""Streams: datasets that can only be iterated, read once a machine or in parts."""
