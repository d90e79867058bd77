"""What the ranks have made of their parts, in one order on rank 0: in memory or in a file."""
