"""The proof: what shows that every layout trains like one process, and that a wrong program is seen.

lattice.py   the layouts that the rules allow, and cells that cover them with their switches
verify/      runs train.py under a layout and compares it with one process, in fp64 (scripts.verify)
precision/   the same in the dtypes that people train in, within derived bounds (scripts.verify --precision)
mup.py       the coordinate check of muP (scripts.verify --coord)
mutate/      plants bugs, by hand and drawn, and counts which are seen (scripts.mutate)
"""
