"""`python -m rlnumba` is the command `rlnumba`."""

from rlnumba.cli import main

main()
