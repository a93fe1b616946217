"""One experiment a file; each docstring has the command and the result to expect."""
