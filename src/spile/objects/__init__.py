"""Bytes in folders and buckets: local, gs, s3. The only import of the object-store library."""
