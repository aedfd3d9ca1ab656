"""`python -m diffcluster` is the `diffcluster` command."""

from diffcluster.cli import main

main()
