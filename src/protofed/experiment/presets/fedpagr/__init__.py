"""The presets of FedPAGR."""
