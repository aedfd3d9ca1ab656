"""Moves messages (control, bulk) and tensors (slots, engines) between processes."""
