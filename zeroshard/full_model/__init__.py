"""The full model outside of forward and backward: read, written, loaded, built, and given back."""
