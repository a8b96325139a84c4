"""PyTorch on Deuteron, in Horovod's words."""
