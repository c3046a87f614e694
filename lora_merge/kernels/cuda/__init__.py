"""The compiled kernels for GPUs: `backend` prepares tables for them."""
