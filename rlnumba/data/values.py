"""Any value as JSON has it, and copies of such values."""

import math

import numpy as np


def own_copy(value):
    """A value of JSON with lists and dicts of its own; what else stands in them is the same as before."""
    if type(value) is list:
        return [own_copy(item) if type(item) in (list, dict) else item for item in value]
    if type(value) is dict:
        return {key: own_copy(item) for key, item in value.items()}
    return value


def as_json(value, keeps_nan=False):
    """A value that JSON can represent: NumPy scalars and arrays become numbers and lists, numbers that are not finite
    None unless keeps_nan, objects of other types their str."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if keeps_nan or math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): as_json(item, keeps_nan) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, keeps_nan) for item in value]
    return value if isinstance(value, str | int | None) else str(value)
