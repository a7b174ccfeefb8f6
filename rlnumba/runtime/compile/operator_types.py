"""Types of Numba's operators, remembered, because inferring them is a third of the time of a compilation.

For every `a + b` of a kernel Numba tries a dozen rules, most of them for other types, once when it infers types and
again when it lowers the expression. The answer follows from the types of the operands, of which kernels have few.
"""

import functools
import operator

# Functions that kernels apply to numbers, arrays and tuples.
OPERATORS = [value for value in vars(operator).values() if callable(value)] + [bool, min, max, abs, range]


@functools.cache
def remember_operators():
    """Have Numba infer the type of an operator once for each combination of operands, from now on.

    The machine code is the same: tests/test_ahead_of_time.py compares it.
    """
    from numba.cuda import types
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.extending import core_models, register_model

    class RememberedFunction(types.Function):
        """A function of Numba's with the signatures that were found."""

        def __init__(self, templates):
            super().__init__(templates)
            self.found = {}

        def augment(self, other):
            return type(self)(self.templates + other.templates) if other.typing_key == self.typing_key else None

        def get_call_type(self, context, args, kws):
            if kws:
                return super().get_call_type(context, args, kws)
            args = tuple(args)
            if args not in self.found:
                self.found[args] = super().get_call_type(context, args, kws)
            return self.found[args]

    # The same model as that of types.Function: a variable that holds a function, as `largest = max` does, has no value
    # at run time.
    register_model(RememberedFunction)(core_models.OpaqueModel)
    context = cuda_target.typing_context
    # Otherwise rules that are loaded later would replace what is registered here.
    context.refresh()
    for function in OPERATORS:
        known = context._lookup_global(function)
        if type(known) is types.Function:
            context._remove_global(function)
            context.insert_global(function, RememberedFunction(known.templates))
