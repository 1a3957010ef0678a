"""One file a command: parse, make a spec, call, print."""
