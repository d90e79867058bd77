"""Read what Slurm, MPI and Kubernetes say of a process's place, and write what starts a job there. Pure."""
