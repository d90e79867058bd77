"""What a step is: whose samples count how much, its slices, its random numbers, and the conditions that it is taken in.

Nothing here talks to other ranks: whoever needs them passes in a function that does.
"""
