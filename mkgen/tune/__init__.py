"""Searches the `build:` of a spec against the simulator: `space` says what may change, `trial` what a build is worth, `search` goes
from the spec's own build to a better one, `decisions` says what each change gives, `overlay` writes it down."""
