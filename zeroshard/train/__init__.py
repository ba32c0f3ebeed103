"""The trainer behind the command line: text in, a trained model and its metrics out."""
