"""Ranks that stay alive and run cells, from a program or a notebook."""
