"""The web application of ``spile view``: a page of plain JavaScript over a few read-only JSON endpoints."""
