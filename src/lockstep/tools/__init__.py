"""Programs that look at runs and machines. The command line alone imports them, and none imports another."""
