"""The proof: shows that every layout trains like one process, and that bugs are caught.

lattice.py   the layouts that the rules allow, and cells that cover them with their switches
rounded_rows.py
             what parallel.compress_tokens rounds, by its formula
verify/      runs train.py under a layout and compares it with one process, in fp64 (scripts.verify)
precision/   the same in the dtypes used for training, within derived bounds (scripts.verify --precision)
mup.py       the coordinate check of muP (scripts.verify --coord)
mutate/      plants bugs, from a table or drawn at random, and counts how many are caught (scripts.mutate)
"""
