"""One file per command: parse, make a spec, call, print."""
