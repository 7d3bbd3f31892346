"""Schema and files of runs and comparisons: the one room that knows the run folder.

`experiment` writes it, `report` reads it. Nothing in here trains or draws.
"""
