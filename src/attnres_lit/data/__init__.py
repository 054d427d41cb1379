"""What the model eats: corpus -> documents -> tokens -> LitData shards -> batches.

`corpora` yields documents, `tokenizers` turns them into ids, `shards` writes them to a folder once, and `datamodule`
(the only file here that imports Lightning) streams batches from it.
"""
