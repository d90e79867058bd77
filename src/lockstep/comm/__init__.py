"""Open and close process groups, and run the small collectives that every other room uses."""
