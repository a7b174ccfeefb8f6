"""Sizes rounded up to buckets, so that few CUDA graphs and kernels serve all of them."""


def bucket_step(count, smallest=128):
    """The distance of the buckets around `count`: a sixteenth of the next power of two, at least `smallest`."""
    return max(smallest, (1 << max(count - 1, 0).bit_length()) // 16)


def bucket_of(count, smallest=128):
    """The smallest bucket that holds `count`: a multiple of bucket_step."""
    step = bucket_step(count, smallest)
    return -(-max(count, 1) // step) * step
