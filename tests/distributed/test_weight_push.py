"""Weights pushed into memory of inference processes: by several ranks at once, damaged, and to processes that end."""

import os
import signal
import time

import numpy as np
import pytest

from rlnumba.config import LoraConfig
from rlnumba.distributed.inference import InferenceError
from rlnumba.distributed.shared_memory import make_links
from rlnumba.distributed.weight_push import Mapping, OwnStaging, WeightPusher, bucket_size
from rlnumba.distributed.weight_sync import WeightReceiver, WeightsRefused
from rlnumba.errors import DeviceError
from rlnumba.model.lora import Adapter
from tests.close import assert_same_bits
from tests.distributed.in_threads import run as run_ranks
from tests.distributed.test_inference import LIMITS, Fixture
from tests.engine.test_core import TINY
from tests.engine.test_llm import make_model
