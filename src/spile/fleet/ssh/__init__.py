"""Commands, files and logs on many hosts, over the system's ssh."""
