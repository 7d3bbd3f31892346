"""The presets of FedSAP."""
