"""The data of a job: which samples each rank sees, in which order, and how a pass over them is continued."""
