"""Read what the engines that start processes (Slurm, MPI, Kubernetes) say of a process's place. Pure."""
