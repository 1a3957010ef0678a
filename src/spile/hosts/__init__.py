"""Commands and files on many hosts over ssh."""
