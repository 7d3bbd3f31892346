"""The presets of Fed-ARPL."""
