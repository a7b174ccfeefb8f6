"""Ranks of one run: how they are started (launch.py), what they exchange (communicator.py), and how (transports/)."""

from rlnumba.parallel.communicator import Communicator, SingleRank
from rlnumba.parallel.launch import launch
