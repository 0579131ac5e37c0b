"""What differs between the back ends of Keras: a file each."""
