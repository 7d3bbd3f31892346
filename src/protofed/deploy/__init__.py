"""Real federations: keys and start-up kits, a transport that knows no engine, and NVIDIA FLARE behind it."""
