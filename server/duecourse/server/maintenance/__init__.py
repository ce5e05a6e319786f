"""Work in the background that keeps a store and a memory in order: fenced, in small batches, never in anyone's way."""
