"""How to read a Hugging Face model: where its transformer layers, embeddings, norms and head are."""
