"""Back ends of Keras, one module each."""
