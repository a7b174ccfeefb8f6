"""Tools and environments of a run: their schemas, their calls, and the episodes that they make."""
