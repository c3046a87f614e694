"""The portable second implementation for GPUs: `backend` prepares tables for it."""
