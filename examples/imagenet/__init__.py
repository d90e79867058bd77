"""Train an image classifier on folders of pictures, in lockstep.

    lockstep run -n 4 -m examples.imagenet DATA                       four replicas in processes
    python -m examples.imagenet DATA --mode spawn --nprocs 4          the same, starting its own processes
    python -m examples.imagenet DATA --mode dp --gpus 4,5,6,7         four replicas in threads; also cpu,cpu
    python -m examples.imagenet DATA                                  one device
    python -m examples.imagenet DATA --mode spawn --nprocs 8 \\
        --dist-url tcp://10.0.0.1:23456 --world-size 2 --rank 0               eight ranks on each of two machines
    python -m examples.imagenet DATA --evaluate                       test the newest checkpoint

Pictures lie in ``DATA/train/<class>/`` and ``DATA/val/<class>/``. The models are torchvision's, by name, and a small
ResNet for pictures of 32 x 32 pixels. The recipe for large batches follows P. Goyal et al., "Accurate, Large Minibatch
SGD: Training ImageNet in 1 Hour", 2017, arXiv:1706.02677.
"""
