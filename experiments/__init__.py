"""The command line: the only flags of the project."""
