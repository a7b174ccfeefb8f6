"""Functions of one number that several losses use, without overflow, and so that a NaN stays one."""

import math

import numpy as np

from rlnumba.kernels.ptx.warp import device_function

ZERO, ONE = np.float32(0.0), np.float32(1.0)


@device_function
def clamp(value, low, high):
    """value within [low, high]; a NaN stays NaN, where a GPU's min and max would return a bound."""
    if value < low:
        return low
    if value > high:
        return high
    return value


@device_function
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    small = np.float32(math.exp(-abs(x)))
    return ONE / (ONE + small) if x >= ZERO else small / (ONE + small)


@device_function
def log_sigmoid(x):
    """log(sigmoid(x)), without overflow."""
    rest = np.float32(math.log1p(np.float32(math.exp(-abs(x)))))
    return (x if x < ZERO else ZERO) - rest
