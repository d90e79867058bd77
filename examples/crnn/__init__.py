"""Train a text recogniser on lines of handwritten digits, in lockstep.

    lockstep run -n 2 -m examples.crnn --mode ddp             two replicas in processes
    python -m examples.crnn --mode dp --gpus 0,1              two replicas in threads; also cpu,cpu
    python -m examples.crnn --mode single                     one device
    python -m examples.crnn --evaluate --picture lines.png    the newest checkpoint, and what it reads

A convolutional-recurrent recogniser (B. Shi, X. Bai and C. Yao, "An End-to-End Trainable Neural Network for
Image-based Sequence Recognition and Its Application to Scene Text Recognition", 2015, arXiv:1507.05717), small, with
the CTC loss (A. Graves, S. Fernandez, F. Gomez and J. Schmidhuber, "Connectionist Temporal Classification", ICML 2006).
Its lines are composed from scikit-learn's handwritten digits: Note [Seeded lines] in ``lines.py``.
"""
