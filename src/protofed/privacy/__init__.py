"""Privacy: sums over clients of which a server learns the total alone, in `secure.py` and the modules that it needs."""
