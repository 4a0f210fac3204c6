"""`python -m fnppo`."""

from fnppo.cli import main

main()
