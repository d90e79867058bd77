"""Train a small GPT on the text of Python's own help, in lockstep.

    lockstep run -n 2 -m examples.gpt                    two replicas on this machine
    python -m examples.gpt                               the same losses, bit for bit, alone
    lockstep run -n 2 -m examples.gpt --resume           resume an interrupted run where it was, within an epoch too
    python -m examples.gpt --evaluate --prompt "If"      load the newest checkpoint, test it and let it write

A decoder of the kind of A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, of about a
million parameters, on text that Python brings along: what ``help("topics")`` lists. Every global batch is cut into
slices, so the run ends with the same bits on any number of ranks (docs/exactness.md).
"""
