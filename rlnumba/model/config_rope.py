"""Keys of config.json about the rotary embedding."""

from dataclasses import fields

from rlnumba.errors import UserError
from rlnumba.kernels.nn.rope import ROPE_TYPES, RopeScaling
from rlnumba.model.config_values import HYBRIDS, count, get, positive

ROPE_FIELDS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
# Of positions in pictures: text has the same number on each axis.
MROPE_FIELDS = ("mrope_section", "mrope_interleaved")
# The fields of RopeScaling, but for its first one, rope_type.
SCALING_FIELDS = tuple(field.name for field in fields(RopeScaling))[1:]


def read_rope(raw, source):
    """(theta, RopeScaling or None) from rope_parameters (transformers 5) or rope_theta and rope_scaling."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key), dict | None):
            raise UserError(f"{source}: {key} must be an object or null, got {raw[key]!r}")
    # rope_scaling goes first where both are written, as in transformers.
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or {}
    where = f"{source}: {key}"
    kind = get(rope, "rope_type", str, where, get(rope, "type", str, where, "default"))
    if kind not in ("default", *ROPE_TYPES):
        raise UserError(f"{where}: rope_type {kind!r} is not supported (supported: default, {', '.join(ROPE_TYPES)})")
    known = (*ROPE_FIELDS, *SCALING_FIELDS, *(MROPE_FIELDS if raw["model_type"] in HYBRIDS else ()))
    for field, value in rope.items():
        if field not in known and value is not None:
            raise UserError(f"{where}: {field} is not supported")
    if kind == "default":
        return _theta(raw, source), None
    settings = {field: _scaling_value(rope, field, where) for field in SCALING_FIELDS}
    if kind in ("llama3", "yarn"):
        # A key of the whole model goes first, as in transformers. Without any, the model was trained with all
        # positions.
        positions = count(raw, "max_position_embeddings", source)
        original = count(raw, "original_max_position_embeddings", source, settings["original_max_position_embeddings"])
        settings["original_max_position_embeddings"] = original = original or positions
        if kind == "yarn" and settings["factor"] is None:
            settings["factor"] = positions / original
    try:
        scaling = RopeScaling(kind, **{field: value for field, value in settings.items() if value is not None})
    except ValueError as error:
        raise UserError(f"{where}: {str(error).removeprefix('rope_scaling: ')}") from None
    return _theta(raw, source), scaling


def _theta(raw, source):
    """The base of the frequencies, which stands in the config itself, in rope_parameters or in rope_scaling.

    Raises UserError for another one in another of these places, and for one in rope_parameters alone where transformers
    reads rope_scaling instead.
    """
    both, scaling = (raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    places = {"rope_theta": raw, "rope_parameters.rope_theta": both, "rope_scaling.rope_theta": scaling}
    named = {name: positive(keys, "rope_theta", source, None) for name, keys in places.items()}
    found = one_number(named, source)
    if found is not None and scaling and named["rope_theta"] is named["rope_scaling.rope_theta"] is None:
        raise UserError(
            f"{source}: rope_scaling takes the place of rope_parameters, and lacks their rope_theta {found:g}"
        )
    return 10000.0 if found is None else found


def one_number(named, source):
    """The number of keys that are one setting, {name: number or None}; None where none is set. Raises UserError where
    two differ, of which the version of transformers decides which one it reads."""
    (first, value), *others = [each for each in named.items() if each[1] is not None] or [(None, None)]
    for other, own in others:
        if own != value:
            raise UserError(
                f"{source}: {first} is {value:g} and {other} {own:g}, which are one setting, and versions of "
                "transformers read one or the other: leave the right one"
            )
    return value


def _scaling_value(rope, field, where):
    """The value of a field of RopeScaling, or None."""
    if field == "truncate":
        return get(rope, field, bool, where, None)
    return count(rope, field, where, None) if "position" in field else positive(rope, field, where, None)


def read_partial_rotary_factor(raw, head_dim, is_supported, source):
    """The part of a head that rotates: 1.0, or a fraction where the model type has one."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    partial = get({**raw, **rope}, "partial_rotary_factor", float, source, 1.0)
    if partial != 1.0 and not is_supported:
        raise UserError(f"{source}: partial_rotary_factor {partial} is not supported")
    rotary = int(head_dim * partial)
    if not 0.0 < partial <= 1.0 or rotary < 2 or rotary % 2:
        raise UserError(
            f"{source}: partial_rotary_factor must be in (0, 1] and leave an even number of the {head_dim} elements of "
            f"a head, got {partial}"
        )
    return partial
