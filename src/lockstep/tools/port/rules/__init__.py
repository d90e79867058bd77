"""Rules: what each matches, what it writes, what it says and what it refuses; one file for each kind of script."""
