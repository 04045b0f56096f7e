"""How softmax attention gets the keys and values of other ranks."""
