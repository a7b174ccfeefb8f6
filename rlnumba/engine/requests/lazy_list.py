"""Fields of dataclasses that are lists, and are kept as arrays until the list is asked for."""

import numpy as np


class LazyList:
    """A field of a dataclass that is a list, set as one or as an array, which `array_of` returns without a copy.

    The list of an array is made when it is first asked for: it takes far longer than a copy of the array.
    """

    def __init__(self, dtype, default=None):
        self.dtype, self.default = dtype, default

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            # The dataclass asks for the field's default.
            if self.default is None:
                raise AttributeError(self.name)
            return self.default
        values = vars(instance)
        if values[self.name] is None:
            values[self.name] = values[f"_{self.name}"].tolist()
        return values[self.name]

    def __set__(self, instance, value):
        is_array = isinstance(value, np.ndarray)
        vars(instance)[self.name] = None if is_array else list(value)
        vars(instance)[f"_{self.name}"] = value.astype(self.dtype, copy=False) if is_array else None

    def array_of(self, instance):
        """The array of an instance, which is not to be written."""
        values = vars(instance)
        if values[f"_{self.name}"] is None:
            values[f"_{self.name}"] = np.array(values[self.name], self.dtype)
        return values[f"_{self.name}"]


class LogprobList(LazyList):
    """The field of log-probs: None, the dicts of listed tokens if there are any, or the log-probs themselves."""

    def __get__(self, instance, owner=None):
        if instance is None:
            return super().__get__(instance, owner)
        values = vars(instance)
        if values.get("top_logprobs") is not None:
            return values["top_logprobs"]
        return None if self.is_none(instance) else super().__get__(instance, owner)

    def __set__(self, instance, value):
        if value is None:
            vars(instance)["logprobs"] = vars(instance)["_logprobs"] = None
        else:
            super().__set__(instance, value)

    def array_of(self, instance):
        return np.zeros(0, self.dtype) if self.is_none(instance) else super().array_of(instance)

    def is_none(self, instance):
        """Whether it is None in an instance."""
        return vars(instance)[f"_{self.name}"] is vars(instance)[self.name] is None
