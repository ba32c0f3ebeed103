"""Gradients between backward and step: what users see and change of them, and how their losses were scaled."""
