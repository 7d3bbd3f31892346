"""The presets of FedAPA."""
