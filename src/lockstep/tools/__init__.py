"""Programs that look at runs and machines: leaves, which nobody but the command line imports."""
