"""The version of zeroshard, once for the package, its metadata and the checkpoints it writes."""

VERSION = "0.1.0"
