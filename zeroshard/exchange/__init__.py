"""Exports checkpoints to, and imports them from, the files of other tools: see docs/checkpoints.md."""

from zeroshard.exchange.exported import export as export
from zeroshard.exchange.exported_dcp import export_dcp as export_dcp
from zeroshard.exchange.imported import import_model as import_model
from zeroshard.exchange.imported_dcp import import_dcp as import_dcp
