"""`python -m kvmosaic` is the `kvmosaic` command."""

from kvmosaic.cli import main

main()
