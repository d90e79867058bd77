"""What the ranks of a job and its watcher tell each other through small shared records. Never imports torch."""
