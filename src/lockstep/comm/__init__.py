"""Open and close process groups, and the small collectives that every other room uses."""
