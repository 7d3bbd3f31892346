"""Privacy: what leaves a site, what it costs, and what it gives away."""
