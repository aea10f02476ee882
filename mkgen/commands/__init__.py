"""Commands that have a file of their own; `mkgen/cli.py` puts them into the group."""
