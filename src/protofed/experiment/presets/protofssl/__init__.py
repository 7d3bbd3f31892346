"""The presets of ProtoFSSL."""
