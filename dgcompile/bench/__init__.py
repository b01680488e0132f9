"""What a bundle takes on this machine, beside other bundles, transformers and the machine's own floor.

job.py                  what is measured, and who takes part
bench.py                the whole: checks, probing, turns, report
turns.py                who is measured when; medians and spreads
stamps.py               when the encoder and the denoiser were called
process.py              a process of its own for each contender, which takes commands
command_loop.py         that process's side of the conversation
bundle_worker.py        the process of a bundle
transformers_worker.py  the process of a checkpoint in transformers; transformers_side.py is what it does
variant.py              the ways to run transformers, and how the best one is found
floor.py                what no implementation can be faster than, here; floor_worker.py measures it
machine.py              facts of this machine
report.py               what came out

Nothing is imported here: the time that a worker takes to import what it needs is one of the figures.
"""
