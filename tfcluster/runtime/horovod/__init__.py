"""Training that the program itself distributes: its optimizer or tape exchanges.

Nothing else is done for such a program (see ``scripts.self_distributed``): it gives
each rank its data, sends the first weights and lets rank 0 write.
"""
