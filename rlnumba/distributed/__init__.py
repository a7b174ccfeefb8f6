"""Several processes of one run: what they do together (communicator.py), and how they are started (launch.py)."""

from rlnumba.distributed.communicator import Communicator, SingleRank
from rlnumba.distributed.launch import launch
