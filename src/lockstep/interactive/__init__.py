"""Ranks that live on and run cells, from a program or a notebook."""
