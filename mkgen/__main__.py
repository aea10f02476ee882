"""`python -m mkgen`."""
from mkgen.cli import main

if __name__ == "__main__":
    main()
