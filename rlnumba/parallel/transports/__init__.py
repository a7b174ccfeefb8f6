"""Ways for bytes between ranks: shared memory, TCP, memory of other GPUs, NCCL."""
