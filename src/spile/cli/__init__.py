"""The command line: each command parses its flags, creates a spec, calls the library and prints the result."""
