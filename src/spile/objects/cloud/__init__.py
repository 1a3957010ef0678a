"""Buckets: ``gs://`` and ``s3://``. Requests, credentials, uploads in parts, what failures mean."""
