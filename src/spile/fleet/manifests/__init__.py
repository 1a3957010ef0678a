"""The same run for clusters that schedule it themselves: Kubernetes manifests, a Slurm array."""
