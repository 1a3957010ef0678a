"""Programs that are sent to a host as text (``python3 -uc …``): standard library only, Python 3.8 or newer."""
