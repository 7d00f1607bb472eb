"""Horovod-like training: the program's own optimizer or tape exchanges the gradients.

tfcluster does nothing else for such a program (see ``scripts.program_kind``). The
program gives each rank its data, broadcasts the initial weights and writes on rank 0.
"""
