"""``tfcluster verify``: whether ranks compute what one process computes."""
