"""The merged checkpoint as a stream of HF tensors, bucket by bucket."""
