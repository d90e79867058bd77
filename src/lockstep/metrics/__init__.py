"""Numbers that a script logs: kept where they are, and put together over the ranks when a line is due."""
