"""Reading files from untrusted sources: as data only, with every number checked."""
