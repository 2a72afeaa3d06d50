"""Context: the same word in different sentences, before and after each layer of a real model."""
