"""Analysis of the user's model before anything is allocated: units, casts, and which module reads which parameter."""
