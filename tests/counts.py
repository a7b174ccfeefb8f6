"""How much the tests draw that could draw any number: RLNUMBA_EPISODES=2000 for a long run of them."""

import os

EPISODES = int(os.environ.get("RLNUMBA_EPISODES", "150"))
