"""What there is to know of the user's model before anything is allocated: units, casts, who reads what."""
