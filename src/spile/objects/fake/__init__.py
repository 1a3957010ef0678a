"""A stand-in for Google Cloud Storage, with faults on demand; ships with the seam that it stands in for."""
