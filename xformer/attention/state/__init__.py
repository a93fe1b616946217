"""Linear attention by a running state: features of queries and keys, and the sum of key features times values."""
