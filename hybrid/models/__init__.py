"""Reading a Hugging Face model: its transformer layers, embeddings, norms and head, as a `DecoderLayout`."""
