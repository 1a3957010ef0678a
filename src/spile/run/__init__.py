"""One run: resolve the spec, work through streams, commit; one process or a pod."""
