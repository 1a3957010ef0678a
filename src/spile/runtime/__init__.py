"""The worker's one loop, its device-to-host pipeline, the pod and the mesh."""
