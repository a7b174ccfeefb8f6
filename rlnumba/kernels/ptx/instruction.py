"""How an instruction that Numba does not offer is defined: PTX for the GPU, and a Python twin for the simulator.

    @instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r")
    def mbarrier_arrive(mbarrier):
        ...  # what the instruction does, in Python

On a GPU the decorated name is a Numba intrinsic that emits the PTX, in the simulator it is the function itself.
Instructions on local arrays or on several threads at once are written with the parts below.
"""

import inspect

from rlnumba.runtime import device

SIMULATED = device.simulated()

if SIMULATED:
    from rlnumba.runtime.simulator import warp_wide

    def instruction(text, operands="", results="", effects=True, memory=True):
        """The simulator's form of the decorator: the twin is the instruction."""
        return lambda twin: twin

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    F32, I32, I64, VOID = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.VoidType()
    # A letter of `operands` and `results`: its LLVM type, its Numba type, and the constraint of inline assembly.
    KINDS = {
        "r": (I32, types.int32, "r"),
        "u": (I32, types.uint32, "r"),
        "l": (I64, types.int64, "l"),
        "f": (F32, types.float32, "f"),
    }

    def warp_wide(twin):
        """On a GPU the twin of a warp-wide instruction is not used."""
        return twin

    def inline_asm(builder, result, operand_types, text, constraints, operands, effects=True):
        """Emit PTX with operands of the given LLVM types; the value of type `result`."""
        function = ir.FunctionType(result, operand_types)
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effects), operands)

    def instruction(text, operands="", results="", effects=True, memory=True):
        """Decorator of a twin: the name becomes an intrinsic that emits `text`.

        operands, results: one letter each, r (int32), u (uint32), l (int64) or f (float32). In the text results are
        numbered before operands: $0, $1, ... Several results come back as a tuple. effects: not to be removed or
        repeated; memory: other accesses to memory do not move across.
        """
        result_types, operand_types = [KINDS[k][0] for k in results], [KINDS[k][0] for k in operands]
        constraints = [f"={KINDS[k][2]}" for k in results] + [KINDS[k][2] for k in operands]
        constraints = ",".join([*constraints, "~{memory}"] if effects and memory else constraints)
        numba_operands, numba_results = [KINDS[k][1] for k in operands], [KINDS[k][1] for k in results]

        def define(typingctx, *_):
            def codegen(context, builder, signature, args):
                if not results:
                    inline_asm(builder, VOID, operand_types, text, constraints, args, effects)
                    return context.get_dummy_value()
                if len(results) == 1:
                    return inline_asm(builder, result_types[0], operand_types, text, constraints, args, effects)
                struct = ir.LiteralStructType(result_types)
                values = inline_asm(builder, struct, operand_types, text, constraints, args, effects)
                return cgutils.pack_array(builder, [builder.extract_value(values, i) for i in range(len(results))])

            if len(results) > 1:
                return types.UniTuple(numba_results[0], len(results))(*numba_operands), codegen
            return (numba_results[0] if results else types.void)(*numba_operands), codegen

        def decorate(twin):
            names = list(inspect.signature(twin).parameters)
            if len(names) != len(operands):
                names = [f"operand{i}" for i in range(len(operands))]
            # Numba takes the number of operands from the signature.
            plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
            define.__signature__ = inspect.Signature([inspect.Parameter(n, plain) for n in ["typingctx", *names]])
            define.__name__, define.__doc__ = twin.__name__, twin.__doc__
            return intrinsic(define)

        return decorate

    def local_elements(context, builder, array_type, array, count, first=0):
        """Pointers to `count` elements of a local array, from a constant or a value of 32 bits on."""
        data = context.make_array(array_type)(context, builder, array).data
        if isinstance(first, int):
            return [builder.gep(data, [ir.Constant(I32, first + i)]) for i in range(count)]
        return [builder.gep(data, [builder.add(first, ir.Constant(I32, i))]) for i in range(count)]

    def array_data(context, builder, array_type, array):
        """Where an array begins, as 64 bits."""
        return builder.ptrtoint(context.make_array(array_type)(context, builder, array).data, I64)

    @intrinsic
    def address_of(typingctx, array):
        """The address of an array in global memory, int64."""

        def codegen(context, builder, signature, args):
            return array_data(context, builder, signature.args[0], args[0])

        return types.int64(array), codegen


if SIMULATED:
    import numpy as np

    def address_of(array):
        """The address of an array in global memory, int64."""
        return np.int64(array.ctypes.data)
