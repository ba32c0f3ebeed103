"""Files that others may have written: read as data, every number checked."""
