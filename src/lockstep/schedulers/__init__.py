"""Read what Slurm, MPI and Kubernetes say of a process's place, and write scripts and manifests for jobs. Pure."""
