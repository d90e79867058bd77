"""Another host, by the system's ssh: a process there, and the frames in which it answers."""
