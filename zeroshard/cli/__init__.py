"""The `zeroshard` command line."""
