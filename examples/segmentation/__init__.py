"""Train a network that says of each pixel what it belongs to, in lockstep.

    lockstep run -n 2 -m examples.segmentation                        two replicas in processes, on drawn shapes
    python -m examples.segmentation --mode dp --gpus cpu,cpu          two replicas in threads; on GPUs 0,1
    python -m examples.segmentation                                   one device
    lockstep run -n 4 --nnodes 2 --rdzv HOST -m examples.segmentation --data VOC2012 -a deeplabv3_resnet50
    python -m examples.segmentation --evaluate --picture shapes.png   the newest checkpoint, and what it sees

The networks are torchvision's FCN (J. Long, E. Shelhamer and T. Darrell, "Fully Convolutional Networks for Semantic
Segmentation", 2014, arXiv:1411.4038) and DeepLabV3 (L.-C. Chen et al., "Rethinking Atrous Convolution for Semantic
Image Segmentation", 2017, arXiv:1706.05587), by name, and an FCN on a small network for CPUs. The pictures are shapes
that are drawn by seed, or real ones in folders as those of the Pascal VOC challenge.
"""
